// SPDX-License-Identifier: Apache-2.0

package lint

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const root = "../.."

func TestImportsPointOneWay(t *testing.T) {
	ps, err := List(root)
	if err != nil {
		t.Fatal(err)
	}
	if len(ps) < 5 {
		t.Fatalf("go list found %d packages only", len(ps))
	}
	for _, line := range Check(ps) {
		t.Error(line)
	}
}

func TestCheckFindsViolations(t *testing.T) {
	own := func(s string) string { return Module + "/" + s }
	for _, c := range []struct {
		name string
		p    Package
		bad  int
	}{
		{"standard library", Package{ImportPath: own("wire"), Imports: []string{"net/netip", "errors"}}, 0},
		{"upwards", Package{ImportPath: own("wire"), Imports: []string{own("qp")}}, 1},
		{"sideways", Package{ImportPath: own("mr"), Imports: []string{own("wire")}}, 1},
		{"prefix of a name is not a folder", Package{ImportPath: own("qp"), Imports: []string{own("wirex")}}, 1},
		{"module not listed", Package{ImportPath: own("wire"), Imports: []string{"golang.org/x/sys/unix"}}, 1},
		{"module listed", Package{ImportPath: own("tap"), Imports: []string{"golang.org/x/sys/unix"}}, 0},
		{"tests may more", Package{ImportPath: own("tap"), TestImports: []string{own("internal/fabric")}}, 0},
		{"code may not what tests may", Package{ImportPath: own("tap"), Imports: []string{own("internal/fabric")}}, 1},
		{"nested", Package{ImportPath: own("tap/taptest"), Imports: []string{own("tap"), own("qp")}}, 1},
		{"C", Package{ImportPath: own("qp"), CgoFiles: []string{"x.go"}}, 1},
		{"unknown folder", Package{ImportPath: own("misc")}, 1},
		{"not ours", Package{ImportPath: "example.com/x", Imports: []string{own("qp")}}, 0},
	} {
		if bad := Check([]Package{c.p}); len(bad) != c.bad {
			t.Errorf("%s: %q, want %d lines", c.name, bad, c.bad)
		}
	}
}

// TestDesignHoldsTheTable sees to it that the table that people read is this one.
func TestDesignHoldsTheTable(t *testing.T) {
	b, err := os.ReadFile(root + "/docs/design.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range table {
		if strings.Contains(r.folder, "/") {
			continue
		}
		row := ""
		for line := range strings.Lines(string(b)) {
			if strings.HasPrefix(line, "| `"+r.folder+"/`") {
				row = line
			}
		}
		if row == "" {
			t.Errorf("docs/design.md has no row for %s/", r.folder)
			continue
		}
		if cells := strings.Split(row, "|"); len(cells) >= 4 {
			for _, own := range r.own {
				if own != "*" && own != r.folder && !strings.Contains(cells[3], "`"+own+"`") && !strings.Contains(cells[3], "all above") {
					t.Errorf("docs/design.md: the row of %s/ does not name %s, which it may import", r.folder, own)
				}
			}
		}
	}
}

// TestFilesSayTheirLicence: the licence stands in the first line of every source file.
func TestFilesSayTheirLicence(t *testing.T) {
	n := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (strings.HasPrefix(d.Name(), ".git") || d.Name() == "testdata" || d.Name() == "bin") {
			return filepath.SkipDir
		}
		switch filepath.Ext(path) {
		case ".go", ".c", ".h":
		default:
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		n++
		first, _, _ := strings.Cut(string(b), "\n")
		if !strings.Contains(first, "SPDX-License-Identifier: Apache-2.0") {
			t.Errorf("%s begins with %q instead of its SPDX line", path, first)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if n < 20 {
		t.Errorf("looked at %d files only", n)
	}
}
