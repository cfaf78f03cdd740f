// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// memoryChecks are those of testdata/memory.c.
var memoryChecks = []string{"implicit", "advise", "null", "dm", "domains", "imports"}

// TestMemory runs the checks of testdata/memory.c, which was built with Debian's
// headers and library.
func TestMemory(t *testing.T) {
	for _, c := range memoryChecks {
		t.Run(c, func(t *testing.T) { inFabric(t, nil, 0, 1, bin("memory"), c) })
	}
}

// TestDV installs the libraries, builds testdata/dv.c as a user would, with the
// installed header, library and pkg-config file, and runs it.
func TestDV(t *testing.T) {
	prefix := t.TempDir()
	run := func(env []string, name string, args ...string) string {
		t.Helper()
		c := exec.Command(name, args...)
		c.Env = append(os.Environ(), env...)
		out, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	run(nil, "make", "-s", "-C", "../..", "install-libs", "LIBDIR="+libs(), "PREFIX="+prefix)
	prog := filepath.Join(prefix, "dv")
	run([]string{"PKG_CONFIG_PATH=" + prefix + "/lib/pkgconfig"}, "sh", "-c",
		"cc -O2 -g -Wall -Wextra -Werror -o "+prog+" testdata/dv.c $(pkg-config --cflags --libs libtapverbs)")
	run(nil, bin("tapverbs"), "run", "-libs", filepath.Join(prefix, "lib"), "--", prog)

	out := run(nil, "nm", "-D", "--with-symbol-versions", "--defined-only", filepath.Join(prefix, "lib/libtapverbs.so.1"))
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if name := f[len(f)-1]; !strings.HasPrefix(name, "tapverbs_dv_") && name != "TAPVERBS_1.0" {
			t.Errorf("libtapverbs.so.1 exports %s", name)
		} else if name, _, ok := strings.Cut(name, "@@TAPVERBS_1.0"); ok && name != "tapverbs_dv_is_supported" {
			if _, err := os.Stat(filepath.Join(prefix, "share/man/man3", name+".3")); err != nil {
				t.Error(err)
			}
		}
	}
	if _, err := os.Stat(filepath.Join(prefix, "share/man/man7/tapverbs_dv.7")); err != nil {
		t.Error(err)
	}
}

// TestUnplug runs testdata/unplug.c: the TAP is deleted, or the device unplugged by hand,
// under traffic.
func TestUnplug(t *testing.T) {
	for _, how := range []string{"poll", "events"} {
		t.Run(how, func(t *testing.T) { inFabric(t, nil, 0, 1, bin("unplug"), how, "16") })
	}
}

// regionChecks are those of testdata/regions.c.
var regionChecks = []string{"residency", "evict-program", "evict-file", "evict-compressed", "failing", "budget", "suspend", "usage", "dirty", "notify", "replace", "move", "eliminate", "events", "policy"}

// TestRegions runs the checks of testdata/regions.c: what tapverbs_dv.h has for regions.
func TestRegions(t *testing.T) {
	for _, c := range regionChecks {
		t.Run(c, func(t *testing.T) { inFabric(t, nil, 0, 1, bin("regions"), c) })
	}
	inFabric(t, []string{"TAPVERBS_BUDGET=3M", "TAPVERBS_STORE=compressed"}, 0, 1, bin("regions"), "env")
}

// TestRegCache runs the checks of testdata/regcache.c: the cache of registrations.
func TestRegCache(t *testing.T) {
	for _, c := range []string{"lookups", "stale", "bounds", "events", "threads"} {
		t.Run(c, func(t *testing.T) { inFabric(t, nil, 0, 1, bin("regcache"), c) })
	}
}

// TestRegCacheRoom runs testdata/room.c: the cache when regions cannot be had.
func TestRegCacheRoom(t *testing.T) {
	if out, err := exec.Command(bin("room")).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestStructsThatCannotGrow: tapverbs_dv(7) names the structs without comp_mask, and no
// others.
func TestStructsThatCannotGrow(t *testing.T) {
	header, err := os.ReadFile("../../shim/dv/infiniband/tapverbs_dv.h")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/man/tapverbs_dv.7")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), ".SS How structs grow\n")
	section, _, _ = strings.Cut(section, "\n.SS ")
	for _, m := range regexp.MustCompile(`(?ms)^struct (tapverbs_dv_\w+) \{(.*?)^\};`).FindAllSubmatch(header, -1) {
		grows := regexp.MustCompile(`^\s*(/\*.*?\*/\s*)?uint64_t comp_mask;`).Match(m[2])
		if name := string(m[1]); grows == regexp.MustCompile(`\b`+name+`\b`).MatchString(section) {
			t.Errorf("struct %s begins with comp_mask: %v; tapverbs_dv(7) says otherwise", name, grows)
		}
	}
}

// TestForks runs the checks of testdata/forks.c: what a child finds in memory that is
// evicted, with the kernel's event and without the privilege for it.
func TestForks(t *testing.T) {
	for _, store := range []string{"file:" + t.TempDir(), "compressed"} {
		for _, c := range []string{"sees", "outlives", "own"} {
			t.Run(store[:4]+"/"+c, func(t *testing.T) {
				inFabric(t, []string{"TAPVERBS_STORE=" + store}, 0, 1, bin("forks"), c)
			})
		}
	}
	inFabric(t, nil, 0, 1, bin("forks"), "unprivileged")
}
