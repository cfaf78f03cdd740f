// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

// TestCategories: what perf script printed once is put where it belongs.
func TestCategories(t *testing.T) {
	hits, err := perfScript(printed(t, "perf_script.txt"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		catReadCopy, catWriteCopy, catRead, catRead, catEntry, catClock, catICRC, catRings, catTAP, catEngine,
		catSleep, catPages, catProgram, catEntry, catClock, catCopy, catRuntime, catProtocol, catRuntime,
	}
	if len(hits) != len(want) {
		t.Fatalf("%d samples, want %d", len(hits), len(want))
	}
	for i := range hits {
		if got := hits[i].category(); got != want[i] {
			t.Errorf("sample %d, in %s: %q, want %q", i, hits[i].chain[0].sym, got, want[i])
		}
		if hits[i].ns != 250000 || hits[i].at < 69684 {
			t.Errorf("sample %d: %v ns at %v", i, hits[i].ns, hits[i].at)
		}
	}
	if _, err := perfScript("failed to open perf.data: No such file or directory\n"); err == nil {
		t.Error("an error is taken for samples")
	}
}

// TestCategoryOfC: what a C program's samples are about.
func TestCategoryOfC(t *testing.T) {
	for _, c := range []struct {
		want  string
		chain []call
	}{
		{catRings, []call{{"ibv_poll_cq", "/usr/bin/ib_write_bw"}}},
		{catRings, []call{{"next_poll", "/opt/lib/libibverbs.so.1"}}},
		{catProgram, []call{{"run_iter_bw", "/usr/bin/ib_write_bw"}}},
		{catRuntime, []call{{"crosscall2", "/opt/lib/libtapverbs-engine.so"}}},
		{catEngine, []call{{"github.com/tapverbs/tapverbs/provider.(*shard).step", "/opt/lib/libtapverbs-engine.so"}}},
		{catCopy, []call{{"__memmove_avx_unaligned_erms", "/usr/lib/x86_64-linux-gnu/libc.so.6"}}},
		{catClock, []call{{"[unknown]", "[vdso]"}}},
		{catFault, []call{{"clear_page_erms", "[kernel.kallsyms]"}, {"handle_mm_fault", "[kernel.kallsyms]"}, {"main", "/usr/bin/ib_write_bw"}}},
		{catWrite, []call{{"br_forward", "[bridge]"}, {"tun_get_user", "[tun]"}, {"vfs_writev", "[kernel.kallsyms]"}}},
		{catKernel, []call{{"kmem_cache_alloc", "[kernel.kallsyms]"}, {"__x64_sys_socket", "[kernel.kallsyms]"}}},
		// What the caller did before does not count, only what the kernel was asked for.
		{catKernel, []call{{"tcp_sendmsg", "[kernel.kallsyms]"}, {"main", "/usr/bin/x"}, {"ksys_write", "[kernel.kallsyms]"}}},
		{catOther, []call{{"[unknown]", "[unknown]"}}},
		{catOther, nil},
	} {
		if got := (&hit{chain: c.chain}).category(); got != c.want {
			t.Errorf("%v: %q, want %q", c.chain, got, c.want)
		}
	}
}

// TestSpans: what counts is from the first to the last sample of what is meant, with what others did
// meanwhile, and without what was between.
func TestSpans(t *testing.T) {
	at := func(s float64, sym ...string) hit {
		h := hit{at: s, ns: 10}
		for _, n := range sym {
			h.chain = append(h.chain, call{n, "/opt/bin/pingpong"})
		}
		return h
	}
	client := []hit{at(1, "fill", "main"), at(2, "poll", "ping", "main"), at(3, "runtime.mcall"), at(4, "ping", "main"), at(5, "verify", "main"), at(6, "ping", "main"),
		at(7, "runtime.mcall"), at(8, "ping", "main"), at(9, "runtime.mcall")}
	ss := spans(client, "main", "ping")
	if len(ss) != 2 || ss[0] != (span{2, 4}) || ss[1] != (span{6, 8}) {
		t.Fatalf("spans %v", ss)
	}
	c := costs(client, ss)
	if c[catProgram] != 40 || c[catRuntime] != 20 || len(c) != 2 {
		t.Errorf("costs %v", c)
	}
	if ss := spans(client, "main", "stream"); ss != nil {
		t.Errorf("spans of what was never done: %v", ss)
	}
}
