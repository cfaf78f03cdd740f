// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/mr"
)

// farReads reads all of b's memory into a's, with everything evicted before each READ if
// evict says so, and gives how long they took together, how often an ACK timeout was hit, and how many retries that
// and other signs of loss have cost.
func farReads(t *testing.T, policy mr.FaultPolicy, size int, evict bool, loss float64, ops int) (took time.Duration, timeouts, retries uint64) {
	t.Helper()
	f := newFarOf(t, size, 200_000, policy)
	a, b := f.a, f.b
	f.pace = 8_000 // about 1 Gbit/s
	lossy := fate{loss: loss}
	f.filter = lossy.delivers
	for i := range ops {
		want := slices.Clone(b.fill(uint64(7 + i)))
		if evict {
			f.evict(a)
			f.evict(b)
		}
		a.wcs, f.sent = nil, nil
		lossy.begin(i)
		begun := f.now
		a.post(a.remote(SendWR{ID: uint64(i), Opcode: WRRead, SGL: a.sgl(0, size), Flags: SendSignaled}, 0))
		f.until(a, 1)
		a.want(WC{ID: uint64(i), Opcode: WCRDMARead})
		took += time.Duration(f.now - begun)
		f.settle()
		got := make([]byte, size)
		a.env.Mem.Override(mr.FaultStall)
		if err := a.env.Mem.Read(a.reg, a.reg.IOVA(), got); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Fatal("wrong bytes")
		}
	}
	st := a.env.Stats
	t.Logf("%d KiB, evicted %v, loss %v: %v; %d timeouts, %d retries, %d RNR NAKs, %d responses out of order, %d READs repeated", size>>10, evict, loss, took,
		st.LocalAckTimeout.Load(), a.qp.losses, st.RcvdRNRNak.Load(), st.OutOfSeqResponse.Load(), b.env.Stats.ReadReexecuted.Load())
	return took, st.LocalAckTimeout.Load(), a.qp.losses
}

// TestLongReads: READs that are asked for in several requests at once, over a link on which
// responses take their time, so that much is on its way when the peer is asked to wait.
// Without loss nothing looks like a loss: no retry is used up, and no timeout is waited
// for, but with FaultDrop, which makes losses of faults. With 1 % loss, faults and losses
// add up.
func TestLongReads(t *testing.T) {
	sizes, ops := []int{64 << 10, 1 << 20, 4 << 20}, 4
	if raceDetector {
		sizes, ops = []int{1 << 20}, 1
	}
	for _, size := range sizes {
		loss, _, _ := farReads(t, mr.FaultHybrid, size, false, 0.01, ops)
		for _, policy := range []mr.FaultPolicy{mr.FaultHybrid, mr.FaultStall, mr.FaultRNR, mr.FaultDrop} {
			t.Run(fmt.Sprintf("%v/%d KiB", policy, size>>10), func(t *testing.T) {
				faults, timeouts, retries := farReads(t, policy, size, true, 0, ops)
				if policy != mr.FaultDrop && timeouts+retries > 0 {
					t.Errorf("%d timeouts and %d retries without loss", timeouts, retries)
				}
				// All that is under way at once is fetched at once, 256 packets here.
				if rounds := uint64(ops * max(1, size/(256<<10))); timeouts > rounds {
					t.Errorf("%d timeouts for %d rounds", timeouts, rounds)
				}
				both, _, _ := farReads(t, policy, size, true, 0.01, ops)
				t.Logf("loss alone %v, faults alone %v, both %v", loss, faults, both)
			})
		}
	}
}
