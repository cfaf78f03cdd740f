// SPDX-License-Identifier: Apache-2.0

package top

import (
	"io"
	"strings"
	"unicode/utf8"

	"github.com/tapverbs/tapverbs/provider"
)

// TextParts is how many parts the maps of Text have.
const TextParts = 72

// Text writes a snapshot as text.
func Text(w io.Writer, sn *provider.Snapshot) error {
	var b strings.Builder
	for _, l := range header(sn) {
		b.WriteString(l + "\n")
	}
	b.WriteString("\n" + of("regions", sn.NumRegions, len(sn.Regions)) + "   " + legend + "\n")
	if len(sn.Regions) > 0 {
		t := regionTable(sn)
		lines := t.lines()
		b.WriteString(lines[0] + "\n")
		for i, r := range sn.Regions {
			b.WriteString(lines[i+1] + "\n")
			if len(r.Map) > 0 {
				b.WriteString("  |" + draw(r.Map, TextParts, r.Suspended) + "|\n")
			}
			for _, l := range events(r.Usage) {
				b.WriteString("  " + l + "\n")
			}
		}
	}
	b.WriteString("\n" + of("queue pairs", sn.NumQPs, len(sn.QPs)) + "\n")
	if len(sn.QPs) > 0 {
		b.WriteString(strings.Join(qpTable(sn).lines(), "\n") + "\n")
	}
	b.WriteString("\ncounters\n")
	if len(sn.Counters) > 0 {
		b.WriteString(strings.Join(counterTable(sn, nil).lines()[1:], "\n") + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// lines are the head and the rows in columns.
func (t table) lines() []string {
	width := make([]int, len(t.head))
	all := append([][]string{t.head}, t.rows...)
	for _, row := range all {
		for i, s := range row {
			width[i] = max(width[i], utf8.RuneCountInString(s))
		}
	}
	out := make([]string, len(all))
	for n, row := range all {
		var b strings.Builder
		for i, s := range row {
			if i > 0 {
				b.WriteString("  ")
			}
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(s))
			if t.left[i] {
				s += pad
			} else {
				s = pad + s
			}
			b.WriteString(s)
		}
		out[n] = strings.TrimRight(b.String(), " ")
	}
	return out
}
