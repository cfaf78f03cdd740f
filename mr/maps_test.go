// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseMapping(t *testing.T) {
	for line, want := range map[string]mapping{
		"55d0c0a00000-55d0c0a21000 r--p 00000000 08:01 1835            /usr/bin/a b (deleted)": {span{0x55d0c0a00000, 0x55d0c0a21000}, []byte("r--p"), true, []byte("/usr/bin/a b (deleted)")},
		"7f00-7fff rw-s 00001000 00:05 0 ":                                                    {span{0x7f00, 0x7fff}, []byte("rw-s"), false, nil},
		"ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]": {span{0xffffffffff600000, 0xffffffffff601000}, []byte("--xp"), false, []byte("[vsyscall]")},
	} {
		m, ok := parseMapping([]byte(line))
		if !ok || m.span != want.span || string(m.perms) != string(want.perms) || m.file != want.file || string(m.path) != string(want.path) {
			t.Errorf("%q: %v %+v", line, ok, m)
		}
		for i := range len("7f00-7fff rw-s 00001000 00:05 ") { // nothing shorter is a mapping
			if m, ok := parseMapping([]byte(line[:i])); ok && len(line) < 40 {
				t.Errorf("%q: %+v", line[:i], m)
			}
		}
	}
}

// TestMappings finds a mapping of a file among the process's, once.
func TestMappings(t *testing.T) {
	name := filepath.Join(t.TempDir(), "mapped")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, err := unix.Mmap(int(f.Fd()), 0, 3*pageSize, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(b)
	found := 0
	if err := mappings(func(m mapping) bool {
		if string(m.path) == name {
			found++
			if m.end-m.start != 3*pageSize || string(m.perms) != "r--s" || !m.file {
				t.Errorf("%+v", m)
			}
		}
		return true
	}); err != nil {
		t.Fatal(err)
	}
	if found != 1 {
		t.Errorf("found %d times", found)
	}
}
