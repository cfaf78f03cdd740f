// SPDX-License-Identifier: Apache-2.0

package mr

import "testing"

// BenchmarkEvict is what a page costs on its way out and back: to limbo, and from there by
// a request or by the application's touch; to the store, and from there.
func BenchmarkEvict(b *testing.B) {
	const pages = 1024
	stores := map[string]func() (Store, error){
		"file":       func() (Store, error) { return NewFileStore(b.TempDir()) },
		"compressed": NewCompressedStore,
	}
	back := map[string]func(t *bed, p int) error{
		"request": func(t *bed, p int) error {
			var d [1]byte
			return t.a.Read(t.r, t.r.IOVA()+uint64(p*pageSize), d[:])
		},
		"touch": func(t *bed, p int) error {
			memory(uint64(t.m.Addr())+uint64(p*pageSize), 1)[0]++
			return nil
		},
	}
	for _, name := range []string{"limbo", "file", "compressed"} {
		to := Limbo
		if name != "limbo" {
			to = Stored
		}
		for _, how := range []string{"out", "request", "touch"} {
			b.Run(name+"/"+how, func(b *testing.B) {
				var st Store
				if f := stores[name]; f != nil {
					var err error
					if st, err = f(); err != nil {
						b.Fatal(err)
					}
				}
				t := evicting(b, pages, st)
				t.a.Override(FaultStall)
				t.put(b, 0, pattern(pages*pageSize, 1))
				b.ResetTimer()
				for done := 0; done < b.N; done += pages {
					n := min(pages, b.N-done)
					if how != "out" {
						b.StopTimer()
					}
					t.evict(b, 0, n, to)
					if how == "out" {
						b.StopTimer()
						how := back["request"]
						for p := range n {
							if err := how(t, p); err != nil {
								b.Fatal(err)
							}
						}
						b.StartTimer()
						continue
					}
					b.StartTimer()
					for p := range n {
						if err := back[how](t, p); err != nil {
							b.Fatal(err)
						}
					}
				}
			})
		}
	}
}
