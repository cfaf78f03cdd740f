// SPDX-License-Identifier: Apache-2.0

package main

import "fmt"

// Processor time for a GiB.

// cpuPart finds what a GiB costs from two runs that differ in length: so what it costs to
// start is left out. TCP's is entered with its bandwidth (others.go), the raw device's with its own.
func cpuPart(r *room, b *book) error {
	perf := func(args string) func(int) (outcome, error) {
		return func(n int) (outcome, error) {
			return r.perf(perfRun{size: 1 << 20, args: fmt.Sprintf("%s -n %d", args, n)})
		}
	}
	for _, t := range []struct {
		who, what string
		run       func(messages int) (outcome, error) // of 1 MiB
	}{
		{"perftest", "write", perf("ib_write_bw")},
		{"perftest", "send events", perf("ib_send_bw -e")},
		{"ucx tcp", "write", func(n int) (outcome, error) { return r.ucx(ucxTest{test: "ucp_put_bw", size: 1 << 20, n: n}) }},
		// Each of its round trips is two messages.
		{"libfabric tcp", "send", func(n int) (outcome, error) { return r.both(fiLine(1<<20, n/2), fiPort) }},
	} {
		b.try("cpu", key{Who: t.who, What: t.what, X: 1 << 20}, r.perGiB(b, t.who, t.what, t.run))
	}
	return nil
}

func (r *room) perGiB(b *book, who, what string, run func(int) (outcome, error)) error {
	const short, long = 200, 1224
	var os [2]outcome
	for i, n := range []int{short, long} {
		var err error
		if os[i], err = run(n); err != nil {
			return err
		}
	}
	const gib = (long - short) / 1024
	b.add(who, what, 1<<20, cpuGiB, (os[1].cpu-os[0].cpu)/gib)
	b.add(who, what, 1<<20, allGiB, (os[1].busy-os[0].busy)/gib)
	return nil
}
