// SPDX-License-Identifier: Apache-2.0

package tap_test

import (
	"fmt"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/tap"
)

// The raw device, with no protocol: what everything above is measured against.
// "plain" is through water; no super-frames.

func benchModes(b *testing.B, fn func(b *testing.B, cfg tap.Config)) {
	b.Run("plain", func(b *testing.B) { fn(b, tap.Config{Plain: true}) })
	b.Run("vnet", func(b *testing.B) { fn(b, tap.Config{}) })
}

// One goroutine writes a batch and reads it at the other port: the cost of a frame
// from one process to another, without waking anybody.
func BenchmarkFrame(b *testing.B) {
	for _, size := range []int{64, 1024, 4096 + 70} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			benchModes(b, func(b *testing.B, cfg tap.Config) {
				_, ds := onBridge(b, fabric.Config{}, cfg, cfg)
				out, in := make([]tap.Frame, 32), buffers(32, 9014)
				for i := range out {
					out[i].B = frame(0, 1, size, i)
				}
				b.SetBytes(int64(size))
				b.ReportAllocs()
				got := 0
				for sent := 0; sent < b.N; {
					n, err := ds[0].WriteBatch(out[:min(len(out), b.N-sent)])
					if err != nil {
						b.Fatal(err)
					}
					sent += n
					for got < sent {
						n, err := ds[1].ReadBatch(in)
						if err != nil {
							b.Fatal(err)
						}
						if n == 0 {
							b.Fatalf("%d of %d frames arrived", got, sent)
						}
						got += n
					}
				}
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "frames/s")
			})
		})
	}
}

// A writer and a reader on a thread each, the writer never more than a window
// ahead: the rate of frames that two engines could reach at best. Run it with
// -benchtime of a second or more: the first frames warm the queues up.
func BenchmarkPair(b *testing.B) {
	const window = 4096
	for _, size := range []int{64, 4096 + 70} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			benchModes(b, func(b *testing.B, cfg tap.Config) {
				_, ds := onBridge(b, fabric.Config{}, cfg, cfg)
				out := make([]tap.Frame, 32)
				for i := range out {
					out[i].B = frame(0, 1, size, i)
				}
				b.SetBytes(int64(size))
				b.ReportAllocs()
				reader := ds[1].(tap.StatsReader)
				var wg sync.WaitGroup
				wg.Go(func() {
					in := buffers(64, 9014)
					fds := []unix.PollFd{{Fd: int32(ds[1].FD()), Events: unix.POLLIN}}
					for got := 0; got < b.N; {
						n, err := ds[1].ReadBatch(in)
						if err != nil {
							b.Error(err)
							return
						}
						if got += n; n == 0 {
							if n, err := unix.Poll(fds, 10000); n == 0 || err != nil && err != unix.EINTR {
								b.Errorf("%d of %d frames arrived; poll: %v", got, b.N, err)
								return
							}
						}
					}
				})
				for sent := 0; sent < b.N && !b.Failed(); {
					if sent-int(reader.Stats().RxFrames) >= window {
						runtime.Gosched()
						continue
					}
					n, err := ds[0].WriteBatch(out[:min(len(out), b.N-sent)])
					if err != nil {
						b.Fatal(err)
					}
					sent += n
				}
				wg.Wait()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "frames/s")
			})
		})
	}
}

// One frame there and back, both ends spinning: half of it is the raw half round
// trip.
func BenchmarkRoundTrip(b *testing.B) {
	for _, size := range []int{64, 4096 + 70} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			benchModes(b, func(b *testing.B, cfg tap.Config) {
				_, ds := onBridge(b, fabric.Config{}, cfg, cfg)
				b.ReportAllocs()
				var wg sync.WaitGroup
				side := func(me int) {
					out, in := []tap.Frame{{B: frame(me, 1-me, size, 0)}}, buffers(4, 9014)
					for i := range 2 * b.N {
						if i%2 == me {
							if n, err := ds[me].WriteBatch(out); n != 1 || err != nil {
								b.Error(n, err)
								return
							}
							continue
						}
						for spins := 1; ; spins++ {
							n, err := ds[me].ReadBatch(in)
							if err != nil {
								b.Error(err)
								return
							}
							if n > 0 {
								break
							}
							if spins%(1<<20) == 0 && b.Failed() {
								return // the other side gave up
							}
						}
					}
				}
				wg.Go(func() { side(1) })
				side(0)
				wg.Wait()
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(2*b.N), "ns/half-trip")
			})
		})
	}
}

func BenchmarkReadNothing(b *testing.B) {
	benchModes(b, func(b *testing.B, cfg tap.Config) {
		_, ds := onBridge(b, fabric.Config{}, cfg)
		in := buffers(32, 9014)
		b.ReportAllocs()
		for b.Loop() {
			if n, err := ds[0].ReadBatch(in); n != 0 || err != nil {
				b.Fatal(n, err)
			}
		}
	})
}
