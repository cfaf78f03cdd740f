// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/qp"
)

func TestFlagErrors(t *testing.T) {
	for _, c := range []struct {
		args string
		want string
	}{
		{"-nonsense", "nonsense"},
		{"run", `unexpected argument "run"`},
		{"-op fly", "send, write, write-imm, read, atomic"},
		{"-op send,send", "twice"},
		{"-op all,send", `"all"`},
		{"-mr warm", "resident, cold, pinned"},
		{"-size 0", "bytes from 1"},
		{"-size 4G", "bytes from 1"},
		{"-size 257M", "bytes from 1"},
		{"-size 9223372036854775807K", "bytes from 1"},
		{"-size 8,,9", "bytes from 1"},
		{"-mtu 1500", "256, 512, 1024, 2048 or 4096"},
		{"-iters -1", "-iters"},
		{"-depth 0", "-depth"},
		{"-qp 0", "-qp"},
		{"-qp 257", "-qp"},
		{"-seed x", "seed"},
		{"-paging disk", "userfault or kernel"},
		{"-paging kernel -mr evicting", "userfaultfd"},
		{"-budget 0", "1 to 100"},
		{"-budget 101", "1 to 100"},
		{"-suspend 1ms", "1ms/10ms"},
		{"-suspend 10ms/1ms", "1ms/10ms"},
		{"-suspend 2s/4s", "1ms/10ms"},
		{"-suspend a/b", "1ms/10ms"},
		{"-listen :1 -connect h:1 -port t", "exclude each other"},
		{"-listen :1", "-port"},
		{"-connect h:1", "-port"},
		{"-port tap0", "-listen and -connect"},
		{"-addr 10.0.0.1/24", "-listen and -connect"},
		{"-listen :1 -port t -addr 10.0.0.1", "10.77.0.5/24"},
		{"-listen :1 -port t -gateway x", "IP address"},
		{"-listen :1 -port t -addr 10.0.0.1/24 -gid 2", "GIDs 0 to 1"},
		{"-listen :1 -port t -op send", "client's"},
		{"-listen :1 -port t -json f", "client"},
	} {
		_, err := parseFlags(strings.Fields(c.args), nil)
		var u errUsage
		if !errors.As(err, &u) || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want one line with %q", c.args, err, c.want)
		}
	}
}

func TestWrongArgumentIsOneLine(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	status := run([]string{"-mtu", "7"}, &out, w)
	w.Close()
	var text bytes.Buffer
	if _, err := text.ReadFrom(r); err != nil {
		t.Fatal(err)
	}
	if status != statusUsage || strings.Count(text.String(), "\n") != 1 || !strings.HasPrefix(text.String(), "pingpong: -mtu 7") || out.Len() > 0 {
		t.Errorf("status %d, stderr %q, stdout %q", status, text.String(), out.String())
	}
}

func TestHelpExplainsEachFlag(t *testing.T) {
	var out bytes.Buffer
	if _, err := parseFlags([]string{"-h"}, &out); !errors.Is(err, flag.ErrHelp) {
		t.Fatal(err)
	}
	for _, f := range []string{"listen", "connect", "port", "addr", "gateway", "gid", "frames", "queues", "op", "mr", "size", "iters", "depth",
		"qp", "mtu", "seed", "budget", "suspend", "events", "paging", "json"} {
		_, rest, ok := strings.Cut(out.String(), "\n  -"+f)
		line, _, _ := strings.Cut(strings.TrimLeft(rest, " "), "\n  -")
		if !ok || len(line) < 30 {
			t.Errorf("-h says of -%s: %q", f, line)
		}
	}
}

func TestFlagValues(t *testing.T) {
	o, err := parseFlags(strings.Fields("-op read,send -mr cold -size 8,4K,1M -qp 3 -iters 7 -depth 5 -mtu 512 -seed 9 -budget 40 -suspend 2ms/30ms -events -json f"), nil)
	if err != nil {
		t.Fatal(err)
	}
	p := o.plan
	if !slices.Equal(o.ops, []op{opRead, opSend}) || !slices.Equal(o.mems, []memory{memCold}) || !slices.Equal(p.Sizes, []int{8, 4096, 1 << 20}) ||
		p.QPs != 3 || p.Iters != 7 || p.Depth != 5 || p.MTU != qp.MTU512 || p.Seed != 9 || !p.Events || p.Budget != 40 || p.Suspend != (rhythm{2 * time.Millisecond, 30 * time.Millisecond}) || !o.events || o.json != "f" {
		t.Errorf("%+v", o)
	}
	for in, want := range map[string]string{"host": "host:18515", "host:1": "host:1", ":1": ":1", "::1": "[::1]:18515", "[::1]:2": "[::1]:2"} {
		if got := tcpAddr(in); got != want {
			t.Errorf("tcpAddr(%q) = %q, want %q", in, got, want)
		}
	}
}

// golden is what ibv_rc_pingpong of rdma-core 44 writes for QPN 17, PSN 0x8b5c4e and
// the GID ::ffff:10.77.0.1.
const golden = "0000:000011:8b5c4e:00000000000000000000ffff0a4d0001\x00"

func TestOutOfBandGolden(t *testing.T) {
	want := dest{QPN: 17, PSN: 0x8b5c4e, GID: [16]byte{10: 0xff, 11: 0xff, 12: 10, 13: 77, 15: 1}}
	if got := string(want.encode()); got != golden || len(got) != destLen {
		t.Errorf("encode = %q (%d bytes), want %q (%d)", got, len(got), golden, destLen)
	}
	got, err := parseDest([]byte(golden))
	if err != nil || got != want || got.ours() {
		t.Errorf("parse = %+v, %v", got, err)
	}
	mine := want
	mine.LID = tapverbsLID
	if got, err = parseDest(mine.encode()); err != nil || !got.ours() {
		t.Errorf("our own line: %+v, %v", got, err)
	}
	for n := range destLen {
		if _, err := parseDest([]byte(golden[:n])); err == nil {
			t.Errorf("%d bytes of the line are taken for a line", n)
		}
	}
	for _, bad := range []string{
		strings.Replace(golden, ":0000", "x0000", 1), strings.Replace(golden, "ffff", "fffg", 1),
		strings.Replace(golden, "000011", "00-011", 1), strings.Repeat("0", destLen),
		"0000:000011:8b5c4e:" + strings.Repeat("0", 32) + "\x00",
	} {
		if _, err := parseDest([]byte(bad)); err == nil {
			t.Errorf("%q is taken for a line", bad)
		}
	}
}

func FuzzOutOfBand(f *testing.F) {
	f.Add([]byte(golden))
	f.Add([]byte("0000:00000:0000000:00000000000000000000000000000001\x00")) // digits in the wrong fields
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := parseDest(b)
		if err != nil {
			return
		}
		if e := d.encode(); !bytes.EqualFold(e, b) {
			t.Errorf("%q was read as %q", b, e)
		}
	})
}

func TestPattern(t *testing.T) {
	const size = 5000
	p := newPattern(make([]byte, patternLen(size)), 1)
	again := newPattern(make([]byte, patternLen(size)), 1)
	other := newPattern(make([]byte, patternLen(size)), 2)
	if !bytes.Equal(p.b, again.b) || bytes.Equal(p.b, other.b) {
		t.Error("the pattern does not follow from the seed")
	}
	for _, i := range []uint64{0, 1, 2, patternSteps - 1, patternSteps, 1 << 40} {
		m := bytes.Clone(p.message(i, size))
		if _, ok := p.check(i, m); !ok {
			t.Errorf("message %d is not itself", i)
		}
		for _, j := range []uint64{i + 1, i + 2, i + 8192} {
			if _, ok := p.check(j, m); ok {
				t.Errorf("message %d passes for %d", i, j)
			}
		}
		for at := 0; at < size; at += 37 {
			m[at] ^= 0x10
			if got, ok := p.check(i, m); ok || got != at {
				t.Errorf("a flipped bit in byte %d: found %v at %d", at, !ok, got)
			}
			m[at] ^= 0x10
		}
	}
}

func TestSlots(t *testing.T) {
	for _, size := range []int{1, 8, 64, 65, 4095, 4096, 4097, 1 << 20, maxSize} {
		for o := range numOps {
			for m := range numMemories {
				for ph := range numPhases {
					s := slots(rowSpec{o, m, size}, ph, 0)
					if s.Stride < size || s.Stride%64 != 0 || m.apart() && s.Stride%pageSize != 0 || s.Round < 1 || s.Round > s.Slots {
						t.Errorf("%v %v %v %d: %+v", o, m, ph, size, s)
					}
					if (o.twoSided() || ph == phaseLatency) && s.Round > roundMessages {
						t.Errorf("%v %v %v %d: round of %d", o, m, ph, size, s.Round)
					}
					if total := s.Slots * s.Stride; total > landingBytes || m == memCold && ph == phaseBandwidth && size <= 1<<20 && total < landingBytes-s.Stride {
						t.Errorf("%v %v %v %d: %d bytes of memory", o, m, ph, size, total)
					}
				}
			}
		}
	}
	if s := slots(rowSpec{opWrite, memPinned, 4096}, phaseBandwidth, 65536); s.Slots != 16 {
		t.Errorf("with 64 KiB to lock: %+v", s)
	}
}

func TestRows(t *testing.T) {
	if n := len(rows(nil, nil, []int{1, 2})); n != 4*2+1+2*2 {
		t.Errorf("%d rows by default", n)
	}
	if n := len(rows(nil, []memory{memCold}, []int{1, 2})); n != 4*2+1 {
		t.Errorf("%d rows of cold memory", n)
	}
	if got := rows([]op{opAtomic}, nil, []int{1, 2}); len(got) != 1 || got[0] != (rowSpec{opAtomic, memResident, 8}) {
		t.Errorf("atomics: %v", got)
	}
}

func TestParseStatus(t *testing.T) {
	s := parseStatus([]byte("Name:\tx\nVmLck:\t      12 kB\nVmPin:\t       3 kB\nVmHWM:\t  900 kB\nVmRSS:\t     800 kB\nCapEff:\tff\nodd\n"))
	if s != (procStatus{RSS: 800, Peak: 900, Locked: 15}) {
		t.Errorf("%+v", s)
	}
	if s, err := readStatus(); err != nil || s.RSS <= 0 || s.Peak < s.RSS {
		t.Errorf("own status: %+v, %v", s, err)
	}
}

func TestSnake(t *testing.T) {
	for in, want := range map[string]string{"SentPkts": "sent_pkts", "SentRNRNak": "sent_rnr_nak", "RNRExceeded": "rnr_exceeded", "Dropped": "dropped"} {
		if got := snake(in); got != want {
			t.Errorf("snake(%q) = %q, want %q", in, got, want)
		}
	}
}
