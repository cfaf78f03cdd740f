// SPDX-License-Identifier: Apache-2.0

package lint

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// testName is a test in a table of test/README.md: its folder, and its function.
var testName = regexp.MustCompile("`([a-z/]+)\\.((?:Test|Fuzz)[A-Za-z0-9]+)`")

// TestOperationsHaveTests: each operation in the tables of test/README.md names tests, and
// they exist.
func TestOperationsHaveTests(t *testing.T) {
	b, err := os.ReadFile(root + "/test/README.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	tables := strings.Split(string(b), "| operation | tests |\n|---|---|\n")
	for _, table := range tables[1:] {
		for line := range strings.Lines(table) {
			cells := strings.Split(line, "|")
			if len(cells) != 4 {
				break
			}
			rows++
			names := testName.FindAllStringSubmatch(cells[2], -1)
			if len(names) == 0 {
				t.Errorf("no test for %s", strings.TrimSpace(cells[1]))
			}
			for _, n := range names {
				if !hasTest(t, n[1], n[2]) {
					t.Errorf("%s: folder %s has no %s", strings.TrimSpace(cells[1]), n[1], n[2])
				}
			}
		}
	}
	if rows < 16 {
		t.Errorf("the tables have %d rows only", rows)
	}
}

// hasTest says whether a test file of a folder has a function.
func hasTest(t *testing.T, folder, name string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, folder, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(b), "\nfunc "+name+"(") {
			return true
		}
	}
	return false
}
