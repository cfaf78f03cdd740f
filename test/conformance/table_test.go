// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// rows gives the rows of a markdown file's tables whose first cell is code: the code,
// and the other cells.
func rows(t *testing.T, file string) map[string][]string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	m := map[string][]string{}
	for line := range strings.Lines(string(b)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		name, ok := strings.CutPrefix(cells[0], "`")
		if name, end := strings.CutSuffix(name, "`"); ok && end && len(cells) > 1 && strings.HasPrefix(line, "| `") {
			if m[name] != nil {
				t.Errorf("%s has two rows of %s", file, name)
			}
			m[name] = cells[1:]
		}
	}
	return m
}

// TestTable: README.md tells of each run that it passes, and of no other.
func TestTable(t *testing.T) {
	table := rows(t, "README.md")
	known := map[string]bool{}
	var connected []string
	for _, r := range cmRuns {
		connected = append(connected, r.client)
	}
	for _, r := range slices.Concat(runs, perfRuns, rawRuns, rsocketRuns, connected) {
		known[r] = true
		if c := table[r]; len(c) == 0 || c[0] != "passes" {
			t.Errorf("README.md does not say that %s passes", r)
		}
	}
	for r, c := range table {
		if c[0] == "passes" && !known[r] && (strings.HasPrefix(r, "ib_") || strings.HasPrefix(r, "raw_") || strings.HasPrefix(r, "rstream") || strings.HasPrefix(r, "riostream") || strings.HasPrefix(r, "udpong") || strings.Contains(r, "$TAPVERBS_PEER") || strings.Contains(r, "pingpong -")) {
			t.Errorf("README.md says that %s passes; it did not run", r)
		}
	}
}
