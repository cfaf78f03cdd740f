// SPDX-License-Identifier: Apache-2.0

// Package lint holds the import table of docs/design.md: which folder may import
// what. Imports point one way, so that a packet's way can be read off the tree.
package lint

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
)

// Module is the path of the project's module.
const Module = "github.com/tapverbs/tapverbs"

// Modules that folders may import from.
const (
	xsys    = "golang.org/x/sys"
	water   = "github.com/songgao/water"
	netlink = "github.com/vishvananda/netlink"
	netns   = "github.com/vishvananda/netns"
	zstd    = "github.com/DataDog/zstd"
	hdr     = "github.com/HdrHistogram/hdrhistogram-go"
	plot    = "gonum.org/v1/plot"
	tview   = "github.com/rivo/tview"
	tcell   = "github.com/gdamore/tcell"
	ebpf    = "github.com/cilium/ebpf"
)

// rule says what the packages of a folder may import beside the standard library.
type rule struct {
	folder string // of the module, with all that is below it
	// own lists the project's folders, other the modules.
	own, other []string
	// tests lists the project's folders and the modules that only tests may
	// import; "*" is all.
	tests []string
	cgo   bool
}

// table is the table of docs/design.md. The first rule whose folder fits holds.
var table = []rule{
	{folder: "wire"},
	{folder: "tap", other: []string{xsys, water}, tests: []string{"wire", "internal/fabric", netlink}},
	{folder: "mr/regcache", own: []string{"mr"}, tests: []string{xsys}},
	{folder: "mr", other: []string{xsys, zstd}, tests: []string{"internal/rawfork"}, cgo: true},
	{folder: "qp", own: []string{"wire", "mr"}, tests: []string{"tap"}},
	{folder: "cm", own: []string{"wire"}, tests: []string{"tap"}},
	{folder: "provider", own: []string{"wire", "tap", "mr", "qp", "cm"}, other: []string{xsys, ebpf}, tests: []string{"*"}},
	{folder: "shim", own: []string{"wire", "tap", "mr", "qp", "cm", "provider", "internal/stackroom"}, other: []string{xsys}, tests: []string{"*"}, cgo: true},
	{folder: "internal/fabric", other: []string{xsys, netlink, netns}, tests: []string{"tap"}},
	{folder: "internal/sysfs", other: []string{xsys}},
	{folder: "internal/stats", other: []string{hdr}},
	{folder: "internal/top", own: []string{"mr", "qp", "provider"}, other: []string{xsys, tview, tcell}},
	{folder: "internal", own: []string{"internal"}, other: []string{xsys}, tests: []string{"internal"}},
	{folder: "cmd", own: []string{"wire", "tap", "mr", "qp", "cm", "provider", "internal"}, other: []string{xsys, netlink, netns}, tests: []string{"*"}},
	{folder: "test/bench", own: []string{"*"}, other: []string{xsys, netlink, netns, plot}, tests: []string{"*"}},
	{folder: "test/harness", own: []string{"*"}, other: []string{xsys, netlink, ebpf}, tests: []string{"*"}},
	{folder: "test", own: []string{"*"}, other: []string{xsys, netlink, netns}, tests: []string{"*"}},
}

// Package is what go list tells about a package.
type Package struct {
	ImportPath                         string
	Imports, TestImports, XTestImports []string
	Standard                           bool
	CgoFiles                           []string
	Error                              *struct{ Err string }
}

// List gives the packages of the module in dir.
func List(dir string) ([]Package, error) {
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Imports,TestImports,XTestImports,Standard,CgoFiles,Error", "./...")
	cmd.Dir = dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w: %s", err, stderr.Bytes())
	}
	var ps []Package
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p Package
		switch err := d.Decode(&p); {
		case errors.Is(err, io.EOF):
			return ps, nil
		case err != nil:
			return nil, fmt.Errorf("reading go list's answer: %w", err)
		}
		ps = append(ps, p)
	}
}

// Check gives one line for each import that the table does not allow, and for
// each package that the table does not know.
func Check(ps []Package) (bad []string) {
	for _, p := range ps {
		folder, ok := cutModule(p.ImportPath)
		if !ok {
			continue
		}
		r := find(folder)
		if r == nil {
			bad = append(bad, fmt.Sprintf("%s: no rule for this folder; add one to the table of internal/lint and docs/design.md", folder))
			continue
		}
		if len(p.CgoFiles) > 0 && !r.cgo {
			bad = append(bad, fmt.Sprintf("%s: C code belongs to mr and shim alone", folder))
		}
		for _, imp := range p.Imports {
			if !r.allows(imp, false) {
				bad = append(bad, fmt.Sprintf("%s: may not import %s", folder, imp))
			}
		}
		for _, imp := range append(p.TestImports, p.XTestImports...) {
			if !r.allows(imp, true) {
				bad = append(bad, fmt.Sprintf("%s: its tests may not import %s", folder, imp))
			}
		}
	}
	return bad
}

func find(folder string) *rule {
	for i := range table {
		if below(folder, table[i].folder) {
			return &table[i]
		}
	}
	return nil
}

func (r *rule) allows(imp string, test bool) bool {
	folder, own := cutModule(imp)
	switch {
	case own:
		return below(folder, r.folder) || anyBelow(folder, r.own) || test && anyBelow(folder, r.tests)
	case !strings.Contains(strings.SplitN(imp, "/", 2)[0], "."):
		return true // the standard library, and "C", which cgo holds
	}
	return anyBelow(imp, r.other) || test && anyBelow(imp, r.tests)
}

func cutModule(path string) (folder string, ok bool) {
	if path == Module {
		return "", true
	}
	return strings.CutPrefix(path, Module+"/")
}

func anyBelow(path string, folders []string) bool {
	for _, f := range folders {
		if f == "*" || below(path, f) {
			return true
		}
	}
	return false
}

func below(path, folder string) bool {
	return path == folder || strings.HasPrefix(path, folder+"/")
}
