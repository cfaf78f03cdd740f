// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestReasons: what did not run says why, and what did not run in each round says in how many.
func TestReasons(t *testing.T) {
	b := newBook(3)
	write, send := k("perftest", "write", 8, gbps), k("perftest", "send", 8, gbps)
	for b.round = range 3 {
		if b.round == 1 {
			b.try("perftest", key{Who: "perftest", What: "write", X: 8}, errors.New("no | row"))
			b.try("perftest", key{Who: "perftest", What: "write", X: 64}, errors.New("hung"))
		} else {
			b.add("perftest", "write", 8, gbps, float64(1+b.round))
		}
		b.try("perftest", key{Who: "perftest", What: "send", X: 8}, errors.New("still running"))
		b.try("tcp", key{}, errors.New("there is no iperf3"))
	}
	for _, c := range []struct {
		key
		want string
	}{
		{write, "2.00 (2 of 3 rounds)"},
		{send, "not run: still running"},
		{k("perftest", "read", 8, gbps), dash},
		{k("perftest", "write", 64, gbps), "not run: hung"},
		{k("perftest", "write", 64, cpuGiB), dash}, // another part's
		{k("tcp", "iperf3", 0, gbps), "not run: there is no iperf3"},
	} {
		if got := b.cell(c.key); got != c.want {
			t.Errorf("%v: %q, want %q", c.key, got, c.want)
		}
	}
	var w strings.Builder
	b.table(&w, "Gbit/s", []int{8, 64}, size, gbps, []line{{"ib_write_bw", "perftest", "write"}, {"ib_send_bw", "perftest", "send"}, {"UCX", "ucx tcp", "write"}}, []string{"perftest"})
	const want = "| Gbit/s | 8 B | 64 B |\n|---|---:|---:|\n| ib_write_bw | 2.00 (2 of 3 rounds) | not run: hung |\n| ib_send_bw | not run: still running | – |\n\n"
	if w.String() != want {
		t.Errorf("the table:\n%s", w.String())
	}
	w.Reset()
	b.printAims(&w, []string{"perftest"})
	for _, want := range []string{"not run: hung", "not run: the part raw was not asked for", "not run: no round has all that is compared"} {
		if !strings.Contains(w.String(), want) {
			t.Errorf("%q is not in:\n%s", want, w.String())
		}
	}
}

// TestLowest: of several to compare with, the lowest of each round counts, and no round in
// which one of them is missing.
func TestLowest(t *testing.T) {
	b := newBook(3)
	for i, v := range [][3]float64{{4, 8, 2}, {4, 1, 2}, {4, 0, 1}} {
		b.round = i
		b.add("ours", "", 0, p50, v[0])
		if v[1] > 0 {
			b.add("a", "", 0, p50, v[1])
		}
		b.add("b", "", 0, p50, v[2])
	}
	if r := b.ratio(k("ours", "", 0, p50), k("a", "", 0, p50), k("b", "", 0, p50)); r != 3 {
		t.Errorf("the median of 2 and 4 is %v", r)
	}
}

// TestPlaces: tables get into a document where it has places for them.
func TestPlaces(t *testing.T) {
	b := newBook(1)
	b.add("c", cCalls[0], 0, callNs, 17)
	file := filepath.Join(t.TempDir(), "doc.md")
	const doc = "a\n<!-- bench c -->\nold\n<!-- end -->\nb\n<!-- bench loss -->\nkept\n<!-- end -->\n"
	if err := os.WriteFile(file, []byte(doc), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.write(file, []string{"c"}); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if s := string(got); !strings.HasPrefix(s, "a\n<!-- bench c -->\n| the C side") || strings.Contains(s, "old") || !strings.Contains(s, "17.0") ||
		!strings.HasSuffix(s, "|\n<!-- end -->\nb\n<!-- bench loss -->\nkept\n<!-- end -->\n") {
		t.Errorf("the document:\n%s", s)
	}
	// The same from what was saved.
	saved := filepath.Join(t.TempDir(), "data", "bench.json")
	if err := b.save(saved); err != nil {
		t.Fatal(err)
	}
	again, err := load(saved)
	if err != nil || again.cell(k("c", cCalls[0], 0, callNs)) != "17.0" || again.Rounds != 1 {
		t.Errorf("%+v, %v", again, err)
	}
	if _, err := place("<!-- bench c -->\nno end\n", "c", "x"); err == nil {
		t.Error("a place without an end is taken")
	}
}

// TestReadme: README.md has one place for each section.
func TestReadme(t *testing.T) {
	doc, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range sections {
		if n := strings.Count(string(doc), "<!-- bench "+s.name+" -->\n"); n != 1 {
			t.Errorf("README.md has %d places for %q", n, s.name)
		}
		if _, err := place(string(doc), s.name, ""); err != nil {
			t.Error(err)
		}
	}
}

// TestGuest: what ran in the guest is compared and drawn, what did not says why.
func TestGuest(t *testing.T) {
	b := newBook(2)
	for i, g := range guestRuns {
		b.add("guest tapverbs", g.what, g.size, g.metric(), 4)
		if i == 0 {
			b.try(labPart, key{Who: "guest rxe", What: g.what, X: g.size}, errors.New("hung"))
			continue
		}
		b.add("guest rxe", g.what, g.size, g.metric(), 2)
	}
	names, at := b.ofRXE()
	if len(names) != len(guestRuns)-1 || at[0] != 2 || at[len(at)-1] != 0.5 {
		t.Errorf("of rxe: %v of %v", at, names)
	}
	var w strings.Builder
	b.printGuest(&w, []string{labPart})
	if s := w.String(); !strings.Contains(s, "| 4.00 | not run: hung |") || !strings.Contains(s, "plots/guest.svg") {
		t.Errorf("the table:\n%s", s)
	}
	w.Reset()
	b.printAims(&w, []string{labPart})
	if n := strings.Count(w.String(), "in one guest, "); n != len(guestRuns) || !strings.Contains(w.String(), "not run: hung") {
		t.Errorf("%d rows of %d:\n%s", n, len(guestRuns), w.String())
	}
	dir := t.TempDir()
	if err := b.draw(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "guest.svg")); err != nil {
		t.Error(err)
	}
}
