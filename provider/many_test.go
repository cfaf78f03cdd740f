// SPDX-License-Identifier: Apache-2.0

package provider_test

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/test/harness"
)

// manyQPs connects n more QPs of both ends of a connection, with work queues of 16, and gives
// those of A.
func manyQPs(t testing.TB, c *harness.Conn, n int) []*provider.QP {
	o := harness.ConnOptions{Timeout: 20}
	var qs []*provider.QP
	ends := [2]harness.End{*c.A, *c.B}
	for range n {
		for i, e := range []*harness.End{c.A, c.B} {
			q, err := e.PD.CreateQP(provider.QPInitAttr{Type: qp.TypeRC, SendCQ: e.CQ, RecvCQ: e.CQ,
				Caps: qp.Caps{SendWR: 16, RecvWR: 16, SendSGE: 1, RecvSGE: 1}})
			if err != nil {
				t.Fatal(err)
			}
			ends[i].QP = q
		}
		for i := range ends {
			if err := harness.Up(ends[i].QP, o.Attrs(i, &ends[1-i]), qp.StateRTS); err != nil {
				t.Fatal(err)
			}
		}
		qs = append(qs, ends[0].QP)
	}
	return qs
}

// BenchmarkManyQPs is what a WRITE of 8 bytes costs in both engines when each goes over
// another of so many QPs, 32 of them at a time.
func BenchmarkManyQPs(b *testing.B) {
	for _, n := range []int{1, 32, 100, 1000, 10_000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			c := harness.NewPair(b, taptest.Config{}).Connect(harness.ConnOptions{Mem: 1 << 16})
			qs := manyQPs(b, c, n)
			wr := []qp.SendWR{c.A.Write(c.B, 1, 0, 0, 8)}
			wcs := make([]qp.WC, 64)
			b.ReportAllocs()
			b.ResetTimer()
			next := 0
			for sent, done := 0, 0; done < b.N; {
				for ; sent < b.N && sent-done < min(n, 32); sent++ {
					if k, err := qs[next].PostSend(wr); k != 1 {
						b.Fatal(err)
					}
					next = (next + 1) % n
				}
				c.B.CQ.Poll(wcs) // B answers
				for _, wc := range wcs[:c.A.CQ.Poll(wcs)] {
					if wc.Status != qp.WCSuccess {
						b.Fatal(wc.Status)
					}
					done++
				}
			}
		})
	}
}

// BenchmarkIdleQP is what a connected QP that does nothing takes: of the heap, and of memory
// beyond that, which is its rings.
func BenchmarkIdleQP(b *testing.B) {
	c := harness.NewPair(b, taptest.Config{}).Connect(harness.ConnOptions{Mem: 1 << 16})
	const n = 5000
	for b.Loop() {
		heap, rss := inUse(b)
		qs := manyQPs(b, c, n)
		heap2, rss2 := inUse(b)
		b.ReportMetric(float64(heap2-heap)/(2*n), "heap-B/QP")
		b.ReportMetric(float64(rss2-rss)/(2*n), "RSS-B/QP")
		runtime.KeepAlive(qs)
	}
}

// inUse is how many bytes of the heap are in use, and how many are resident.
func inUse(t testing.TB) (heap, rss int64) {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(b))
	pages, err := strconv.ParseInt(f[1], 10, 64)
	if err != nil {
		t.Fatal(fmt.Errorf("statm %q: %w", b, err))
	}
	return int64(m.HeapAlloc), pages * int64(os.Getpagesize())
}
