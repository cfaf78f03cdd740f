// SPDX-License-Identifier: Apache-2.0

package qp

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/tapverbs/tapverbs/wire"
)

// goodput moves messages of 1 MiB over a link that takes linkPace for a packet of 4 KiB and
// loses some, and gives the share of the link's time that they needed.
func goodput(t *testing.T, op WROpcode, delay int64, loss float64, run int) (share float64, w *world) {
	const messages, size, linkPace = 24, 1 << 20, 3000
	s := usual()
	s.mtu, s.memory = MTU4096, size
	w = newWorld(t, s)
	w.pace, w.delay = linkPace, delay
	r := rand.New(rand.NewPCG(7, uint64(op)))
	until := map[*node]int64{} // all that it sends is lost
	w.filter = func(_ *wire.Packet, n *node) bool {
		if r.Float64() < loss/float64(run) {
			until[n] = n.free + int64(run-1)*linkPace + 1
		}
		return n.free >= until[n]
	}
	for i := range messages {
		w.b.recv(RecvWR{ID: uint64(i), SGL: w.b.sgl(0, size)})
		w.a.post(w.a.remote(SendWR{ID: uint64(i), Opcode: op, SGL: w.a.sgl(0, size), Flags: SendSignaled}, 0))
	}
	began := w.now
	for len(w.a.wcs) < messages {
		if !w.step(Never - 1) {
			t.Fatal("nothing happens any more")
		}
		w.sent = w.sent[:0]
	}
	for i, wc := range w.a.wcs {
		if wc.Status != WCSuccess || wc.ID != uint64(i) {
			t.Fatalf("completion %d: %+v", i, wc)
		}
	}
	return float64(messages*size/4096*linkPace) / float64(w.now-began), w
}

// At 1 % loss two fifths of the bandwidth remain that there is without, also when what is
// lost are runs of packets, as super-frames are; and a quarter on a link that holds so many
// packets that each loss costs 70 of them.
func TestGoodput(t *testing.T) {
	for _, op := range []WROpcode{WRWrite, WRSend, WRRead} {
		for delay, least := range map[int64]float64{0: 0.4, 20_000: 0.4, 100_000: 0.25} {
			clean, _ := goodput(t, op, delay, 0, 1)
			for _, run := range []int{1, 15} {
				t.Run(fmt.Sprintf("%d/%dns/%d", op, delay, run), func(t *testing.T) {
					lossy, w := goodput(t, op, delay, 0.01, run)
					st := w.a.env.Stats
					t.Logf("%.2f of the link without loss, %.2f with it; %d timeouts, %d probes, %d packets again",
						clean, lossy, st.LocalAckTimeout.Load(), st.Probes.Load(), st.RetransmittedPkts.Load())
					if lossy < least*clean {
						t.Errorf("%.2f of the link with loss, %.2f without", lossy, clean)
					}
				})
			}
		}
	}
}

// A probe may be all of a READ that its responder gets to know; what is asked for after it is
// no more than that, and what is behind it.
func TestProbeOfLostRead(t *testing.T) {
	w := newWorld(t, usual())
	requests, answers := 0, 0
	w.filter = func(p *wire.Packet, _ *node) bool {
		switch p.Info.Name {
		case "RC_READ_REQ":
			requests++
			return requests > 1
		case "RC_READ_RESP_ONLY":
			answers++
			return answers > 1
		}
		return true
	}
	want := bytes.Clone(w.b.fill(2)[:9999])
	w.a.post(w.a.remote(SendWR{ID: 1, Opcode: WRRead, SGL: w.a.sgl(0, 9999), Flags: SendSignaled}, 0))
	w.run()
	w.a.want(WC{ID: 1, Opcode: WCRDMARead})
	if !bytes.Equal(w.a.mem.Bytes()[:9999], want) {
		t.Error("wrong data")
	}
	if st := w.a.env.Stats; st.Probes.Load() == 0 || st.LocalAckTimeout.Load() > 1 || answers < 2 {
		t.Errorf("%d probes, %d timeouts, sent %v", st.Probes.Load(), st.LocalAckTimeout.Load(), w.sent)
	}
}
