// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gdamore/tcell/v2"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

// sample is a snapshot of two regions and a QP, at second n of its life.
func sample(n int) *provider.Snapshot {
	const page = 4096
	return &provider.Snapshot{
		Version: provider.SnapshotVersion, Time: time.Unix(int64(1000+n), 0), PID: 4711, Program: "prog\x1b[2J[red]", Port: "tv0p0",
		State: "PORT_ACTIVE", MTU: 4096, Refused: "uso4", Single: []string{"10.91.0.9"}, GIDs: []string{"fe80::1", "::ffff:10.91.0.1"},
		Counters: map[string]uint64{"rcvd_pkts": uint64(100 * n), "sent_pkts": 7},
		Memory:   mr.Usage{Size: 12 * page, Present: 4 * page, Budget: 1 << 20},
		Threads: []mr.ThreadFaults{{TID: 4712, Name: "worker", Minor: 9, Major: 8, Ns: 1_230_000}, {Minor: 1, Ns: 20_000},
			{TID: 2, Minor: 1}, {TID: 3, Minor: 1}},
		QPs: []provider.SnapshotQP{{Num: 0xabc123, Type: "RC", State: "RTS", Peer: "10.91.0.2", PeerQP: 0xdef, Progress: qp.Progress{
			Next: 0x123456, Window: 256, InFlight: 3, Sent: uint32(n), Losses: 5, RetriesLeft: 6, RNRRetriesLeft: 7, Faults: mr.Faults{Minor: 41, Major: 42},
		}}},
		NumQPs: 1, NumRegions: 3,
		Regions: []provider.SnapshotRegion{{
			Key: 0x11111111, Addr: 0x7f0000001000, Length: 8 * page, Paging: "userfault",
			Usage: mr.Usage{Size: 8 * page, Present: 2 * page, Limbo: page, Stored: page, FaultsMinor: 31, FaultsMajor: 32, Placements: 30, AppFaultsMinor: 33,
				AppFaultsMajor: 34, FaultNs: 1500000, RNRs: 35, Evictions: 36, Invalidations: 37, Prefetches: 38},
			Map: []mr.Residency{
				{Size: page, Present: page}, {Size: 3 * page, Present: page}, {Size: page, Limbo: page}, {Size: page, Stored: page},
				{Size: page}, {Size: page, Poisoned: page},
			},
		}, {
			Key: 0x22222222, Addr: 0x7f0000100000, Length: 4 * page, Paging: "kernel", Suspended: true,
			Usage: mr.Usage{Size: 4 * page, Present: 2 * page, Budget: 3 * page},
			Map:   []mr.Residency{{Size: page, Present: page}, {Size: page}, {Size: page}, {Size: page, Present: page}},
		}},
	}
}

func TestDraw(t *testing.T) {
	r := sample(1).Regions
	for _, c := range []struct {
		want string
		got  string
	}{
		{"█▄▒░·×", draw(r[0].Map, 100, false)},
		{"█▒×", draw(r[0].Map, 3, false)},
		{"×", draw(r[0].Map, 1, false)},
		{"▚··▚", draw(r[1].Map, 4, true)},
		{"█··█", draw(r[1].Map, 4, false)},
		{"", draw(nil, 10, false)},
		// Of several the one there is most of; one page is not lost in many.
		{"░▒▄", string([]rune{
			cell(mr.Residency{Size: 100, Present: 10, Limbo: 20, Stored: 30}, false),
			cell(mr.Residency{Size: 100, Present: 10, Limbo: 20}, true),
			cell(mr.Residency{Size: 1 << 40, Present: 1}, false),
		})},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}

func TestSize(t *testing.T) {
	for n, want := range map[uint64]string{0: "0", 1023: "1023", 1024: "1K", 1536: "1.5K", 1 << 20: "1M", 1<<20 - 1: "1M", 1 << 30: "1G", 5 << 40: "5T", ^uint64(0): "16E"} {
		if got := size(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}

func TestText(t *testing.T) {
	var b strings.Builder
	if err := Text(&b, sample(3)); err != nil {
		t.Fatal(err)
	}
	text := narrow(b.String())
	for _, want := range []string{
		"threads waited for pages: worker (4712) 1.23ms, 9 minor, 8 major; others 20µs, 1 minor, 0 major;", "; 1 more\n",
		"process 4711: tv0p0, active, path MTU 4096, fe80::1 10.91.0.1", "memory 48K in regions: 16K present", "budget 1M",
		"regions: 3, of which 2 are shown", "11111111 7f0000001000 32K 8K 4K 4K", "|█▄▒░·×|",
		"requests 31 minor 32 major (1.5ms), application 33 minor 34 major", "placements 30, RNRs 35, evicted 36, invalidated 37, prefetched 38",
		"SUSPENDED", "|▚··▚|", "12K", "abc123 RC RTS", "3/256", "10.91.0.2 000def", "6/7 41 42", "rcvd_pkts 300",
		"single frames, as the kernel has refused super-frames: uso4\n",
		"single frames, as super-frames are lost, to 10.91.0.9\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if strings.ContainsRune(b.String(), 0x1b) {
		t.Error("what another process says gets to the terminal as it is")
	}
}

// terminal is a View on a simulated screen.
type terminal struct {
	t      *testing.T
	screen *watched
	ticks  chan time.Time
	result chan error

	mu  sync.Mutex
	n   int // of the next snapshot
	err error
}

func newTerminal(t *testing.T, width, height int) *terminal {
	m := &terminal{
		t: t, screen: &watched{SimulationScreen: tcell.NewSimulationScreen("UTF-8")}, ticks: make(chan time.Time), result: make(chan error, 1), n: 1,
	}
	ctx, cancel := context.WithCancel(context.Background())
	if err := m.screen.SimulationScreen.Init(); err != nil {
		t.Fatal(err)
	}
	m.screen.SetSize(width, height)
	go func() {
		m.result <- View(ctx, m.look, m.ticks, m.screen)
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case <-m.result:
		default:
		}
	})
	return m
}

// watched is a screen that has been set up, and of which there is always a copy.
type watched struct {
	tcell.SimulationScreen
	mu   sync.Mutex
	text string
}

func (*watched) Init() error { return nil }

func (w *watched) Show() {
	w.SimulationScreen.Show()
	cells, width, _ := w.GetContents()
	var b strings.Builder
	for i, c := range cells {
		if len(c.Runes) > 0 {
			b.WriteRune(c.Runes[0])
		}
		if (i+1)%width == 0 {
			b.WriteByte('\n')
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text = narrow(b.String())
}

func (m *terminal) look(int) (*provider.Snapshot, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return nil, m.err
	}
	sn := sample(m.n)
	m.n++
	return sn, nil
}

// shows waits until the screen has all of some words, and none of others, which begin
// with "!". Go test's own time limit bounds it.
func (m *terminal) shows(words ...string) {
	m.t.Helper()
	for {
		text := m.text()
		ok := true
		for _, w := range words {
			without, not := strings.CutPrefix(w, "!")
			ok = ok && strings.Contains(text, without) != not
		}
		if ok {
			return
		}
		select {
		case err := <-m.result:
			m.result <- err
			m.t.Fatalf("it has ended (%v), without %q:\n%s", err, words, text)
		case <-time.After(time.Millisecond):
		}
	}
}

func (m *terminal) text() string {
	m.screen.mu.Lock()
	defer m.screen.mu.Unlock()
	return m.screen.text
}

// narrow leaves one of spaces in a row.
func narrow(s string) string {
	var b strings.Builder
	for line := range strings.Lines(s) {
		b.WriteString(strings.Join(strings.Fields(line), " ") + "\n")
	}
	return b.String()
}

func (m *terminal) press(k tcell.Key, r rune) { m.screen.InjectKey(k, r, tcell.ModNone) }

// tick has it look, and show what it sees.
func (m *terminal) tick() { m.ticks <- time.Time{} }

func (m *terminal) ends(want error) {
	m.t.Helper()
	if err := <-m.result; !errors.Is(err, want) {
		m.t.Errorf("it ended with %v, not %v", err, want)
	}
}

func TestView(t *testing.T) {
	m := newTerminal(t, 130, 45)
	m.shows("process 4711: tv0p0", "regions: 3, of which 2 are shown", "11111111", "22222222", "█▄▒░·×", "requests 31 minor", "abc123", "rcvd_pkts", "100", "q quit", "!▚··▚", "!A SECOND")
	m.tick()
	m.shows("A SECOND", "rcvd_pkts 200")
	m.press(tcell.KeyDown, 0)
	m.shows("▚··▚", "!█▄▒░·×")
	m.tick() // the region stays chosen
	m.shows("rcvd_pkts 300", "▚··▚")
	m.press(tcell.KeyUp, 0)
	m.shows("█▄▒░·×")

	// The arrows of another pane leave the region alone.
	m.press(tcell.KeyTab, 0)
	m.press(tcell.KeyDown, 0)
	m.press(tcell.KeyTab, 0)
	m.press(tcell.KeyDown, 0)
	m.press(tcell.KeyBacktab, 0)
	m.press(tcell.KeyBacktab, 0)
	m.press(tcell.KeyDown, 0)
	m.shows("▚··▚")

	m.press(tcell.KeyRune, '?')
	m.shows("Shift-Tab")
	m.press(tcell.KeyRune, '?')
	m.shows("!Shift-Tab")

	m.press(tcell.KeyRune, 'p')
	m.shows("PAUSED")
	m.tick()
	m.tick()
	m.shows("rcvd_pkts 300")
	m.press(tcell.KeyRune, 'p')
	m.shows("!PAUSED")
	m.tick()
	m.shows("rcvd_pkts 400")

	m.press(tcell.KeyRune, 'q')
	m.ends(nil)
}

func TestViewTrouble(t *testing.T) {
	m := newTerminal(t, 100, 40)
	m.shows("rcvd_pkts")
	m.mu.Lock()
	m.err = fmt.Errorf("process 4711: %w", ErrSilent)
	m.mu.Unlock()
	m.tick()
	m.shows("does not answer", "rcvd_pkts") // what was seen last stays
	m.mu.Lock()
	m.err = nil
	m.mu.Unlock()
	m.tick()
	m.shows("!does not answer", "200")
	m.mu.Lock()
	m.err = fmt.Errorf("process 4711: %w", ErrEnded)
	m.mu.Unlock()
	m.tick()
	m.ends(ErrEnded)
}

// TestViewSizes: it is drawn on screens of any size, and on one that changes.
func TestViewSizes(t *testing.T) {
	m := newTerminal(t, 130, 45)
	m.shows("q quit")
	for _, size := range [][2]int{{1, 1}, {3, 2}, {20, 5}, {40, 12}, {80, 24}, {300, 100}, {80, 25}} {
		m.screen.SetSize(size[0], size[1])
		m.tick()
		m.press(tcell.KeyRune, '?')
		m.press(tcell.KeyRune, '?')
	}
	m.shows("process 4711", "q quit", "11111111")
	m.press(tcell.KeyCtrlC, 0)
	m.ends(nil)
}

func TestViewNothingThere(t *testing.T) {
	if err := View(context.Background(), func(int) (*provider.Snapshot, error) { return nil, ErrEnded }, nil, nil); !errors.Is(err, ErrEnded) {
		t.Error(err)
	}
}
