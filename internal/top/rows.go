// SPDX-License-Identifier: Apache-2.0

package top

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
)

// clean leaves out what does something to a terminal: what is shown was said by another
// process.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// size writes bytes in as few digits as do: "0", "4K", "1.5M".
func size(n uint64) string {
	if n < 1024 {
		return strconv.FormatUint(n, 10)
	}
	f, unit := float64(n), -1
	for f >= 1023.95 && unit < 5 {
		f /= 1024
		unit++
	}
	unit = max(unit, 0)
	return strings.TrimSuffix(strconv.FormatFloat(f, 'f', 1, 64), ".0") + "KMGTPE"[unit:unit+1]
}

// Cells of a map. What a cell has anything of that is not absent, it shows: of several the
// one there is most of.
const (
	cellPresent   = '█' // half of it at least
	cellPartly    = '▄' // less
	cellSuspended = '▚' // present, and the region is suspended
	cellLimbo     = '▒'
	cellStored    = '░'
	cellLost      = '×' // the store has lost it
	cellAbsent    = '·'
)

const legend = "█ present ▄ partly ▒ limbo ░ stored · absent × lost ▚ suspended"

// draw makes a map of so many cells at most.
func draw(parts []mr.Residency, cells int, suspended bool) string {
	cells = min(cells, len(parts))
	var b strings.Builder
	for i := range cells {
		var sum mr.Residency
		for _, p := range parts[len(parts)*i/cells : len(parts)*(i+1)/cells] {
			sum.Size += p.Size
			sum.Present += p.Present
			sum.Limbo += p.Limbo
			sum.Stored += p.Stored
			sum.Poisoned += p.Poisoned
		}
		b.WriteRune(cell(sum, suspended))
	}
	return b.String()
}

func cell(p mr.Residency, suspended bool) rune {
	switch most := max(p.Present, p.Limbo, p.Stored); {
	case p.Poisoned > 0:
		return cellLost
	case most == 0:
		return cellAbsent
	case most == p.Present && suspended:
		return cellSuspended
	case most == p.Present && p.Present*2 < p.Size:
		return cellPartly
	case most == p.Present:
		return cellPresent
	case most == p.Limbo:
		return cellLimbo
	}
	return cellStored
}

// table is a head and rows; left says which columns are words.
type table struct {
	head []string
	left map[int]bool
	rows [][]string
}

func regionTable(sn *provider.Snapshot) table {
	t := table{
		head: []string{"KEY", "ADDRESS", "LENGTH", "PRESENT", "LIMBO", "STORED", "DIRTY", "BUDGET", "STATE"},
		left: map[int]bool{8: true},
	}
	for _, r := range sn.Regions {
		u := r.Usage
		budget, state := "-", r.Paging
		if u.Budget > 0 {
			budget = size(u.Budget)
		}
		if r.Suspended {
			state = "SUSPENDED"
		}
		t.rows = append(t.rows, []string{
			fmt.Sprintf("%08x", r.Key), fmt.Sprintf("%x", r.Addr), size(r.Length), size(u.Present), size(u.Limbo), size(u.Stored),
			size(u.Dirty), budget, clean(state),
		})
	}
	return t
}

// events says what became of a region's pages, in two lines; nil: nothing.
func events(u mr.Usage) []string {
	if u.FaultsMinor|u.FaultsMajor|u.AppFaultsMinor|u.AppFaultsMajor|u.RNRs|u.Evictions|u.Invalidations|u.Prefetches == 0 {
		return nil
	}
	return []string{
		fmt.Sprintf("faults: requests %d minor %d major (%v), application %d minor %d major",
			u.FaultsMinor, u.FaultsMajor, time.Duration(u.FaultNs).Round(time.Microsecond), u.AppFaultsMinor, u.AppFaultsMajor),
		fmt.Sprintf("placements %d, RNRs %d, evicted %d, invalidated %d, prefetched %d", u.Placements, u.RNRs, u.Evictions, u.Invalidations, u.Prefetches),
	}
}

func qpTable(sn *provider.Snapshot) table {
	t := table{
		head: []string{"QP", "TYPE", "STATE", "UNACKED", "NEXT", "EXPECTED", "FLIGHT", "QUEUE", "SENT", "RECEIVED", "LOSSES", "RNRS", "LEFT", "MINOR", "MAJOR", "PEER"},
		left: map[int]bool{1: true, 2: true, 15: true},
	}
	for _, q := range sn.QPs {
		p := q.Progress
		peer, state, flight := "-", q.State, "-"
		if q.Peer != "" {
			peer = fmt.Sprintf("%s %06x", q.Peer, q.PeerQP)
		}
		if p.Held {
			state += " held"
		}
		if p.Window > 0 {
			flight = fmt.Sprintf("%d/%d", p.InFlight, p.Window)
		}
		t.rows = append(t.rows, []string{
			fmt.Sprintf("%06x", q.Num), clean(q.Type), clean(state), fmt.Sprintf("%06x", p.Unacked), fmt.Sprintf("%06x", p.Next),
			fmt.Sprintf("%06x", p.Expected), flight, strconv.Itoa(int(p.Waiting)), strconv.Itoa(int(p.Sent)),
			strconv.Itoa(int(p.Received)), strconv.FormatUint(p.Losses, 10), strconv.FormatUint(p.RNRs, 10),
			fmt.Sprintf("%d/%d", p.RetriesLeft, p.RNRRetriesLeft), strconv.FormatUint(p.Faults.Minor, 10),
			strconv.FormatUint(p.Faults.Major, 10), clean(peer),
		})
	}
	return t
}

// counterTable has rates a second where there was a look before.
func counterTable(sn, before *provider.Snapshot) table {
	t := table{head: []string{"COUNTER", "VALUE"}, left: map[int]bool{0: true}}
	var seconds float64
	if before != nil {
		seconds = sn.Time.Sub(before.Time).Seconds()
	}
	if seconds > 0 {
		t.head = append(t.head, "A SECOND")
	}
	names := make([]string, 0, len(sn.Counters))
	for name := range sn.Counters {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		v := sn.Counters[name]
		row := []string{clean(name), strconv.FormatUint(v, 10)}
		if seconds > 0 {
			rate := "-"
			if was := before.Counters[name]; v > was {
				rate = strconv.FormatFloat(float64(v-was)/seconds, 'f', 0, 64)
			}
			row = append(row, rate)
		}
		t.rows = append(t.rows, row)
	}
	return t
}

// header says what device it is, and how much memory there is.
func header(sn *provider.Snapshot) []string {
	m := sn.Memory
	memory := fmt.Sprintf("memory %s in regions: %s present, %s limbo, %s stored, %s dirty", size(m.Size), size(m.Present), size(m.Limbo), size(m.Stored), size(m.Dirty))
	if m.Budget > 0 {
		memory += "; budget " + size(m.Budget)
	}
	addrs := slices.Clone(sn.GIDs)
	for i, s := range addrs {
		addrs[i] = strings.TrimPrefix(s, "::ffff:")
	}
	lines := []string{
		clean(fmt.Sprintf("%s, process %d: %s, %s, path MTU %d, %s", sn.Program, sn.PID, sn.Port,
			strings.ToLower(strings.TrimPrefix(sn.State, "PORT_")), sn.MTU, strings.Join(addrs, " "))),
		memory,
	}
	if sn.Paging != "" {
		lines = append(lines, clean("paged by the kernel: "+sn.Paging))
	}
	if sn.Refused != "" {
		lines = append(lines, clean("single frames, as the kernel has refused super-frames: "+sn.Refused))
	}
	if len(sn.Single) > 0 {
		lines = append(lines, clean("single frames, as super-frames are lost, to "+strings.Join(sn.Single, " ")))
	}
	if len(sn.Threads) > 0 {
		lines = append(lines, clean(waited(sn.Threads)))
	}
	return lines
}

// waited says which threads have waited for pages, the first of them.
func waited(ts []mr.ThreadFaults) string {
	var who []string
	for _, t := range ts[:min(len(ts), 3)] {
		name := fmt.Sprintf("%s (%d)", t.Name, t.TID)
		if t.TID == 0 {
			name = "others"
		}
		who = append(who, fmt.Sprintf("%s %v, %d minor, %d major", name, time.Duration(t.Ns).Round(10*time.Microsecond), t.Minor, t.Major))
	}
	line := "threads waited for pages: " + strings.Join(who, "; ")
	if n := len(ts) - len(who); n > 0 {
		line += fmt.Sprintf("; %d more", n)
	}
	return line
}

// of says how many of a kind there are, and how many of these are shown.
func of(kind string, n, shown int) string {
	if shown < n {
		return fmt.Sprintf("%s: %d, of which %d are shown", kind, n, shown)
	}
	return fmt.Sprintf("%s: %d", kind, n)
}
