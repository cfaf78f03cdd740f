// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"bytes"
	"os"
)

// mapping is one of the process's, as /proc/self/maps has it (proc_pid_maps(5)).
type mapping struct {
	span
	perms []byte // "rwxp", or s for shared
	file  bool   // of a file or of shared memory: it has an inode
	path  []byte
}

// mappings calls f for each of the process's mappings by address, until it says false. A
// process may have thousands, and this may be asked for each of as many regions, so nothing
// is parsed by fmt.
func mappings(f func(m mapping) bool) error {
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return err
	}
	for len(b) > 0 {
		line, rest, _ := bytes.Cut(b, []byte{'\n'})
		b = rest
		if m, ok := parseMapping(line); ok && !f(m) {
			break
		}
	}
	return nil
}

// parseMapping takes "start-end perms offset dev inode path" apart.
func parseMapping(line []byte) (m mapping, ok bool) {
	n := 0
	if m.start, n = hexNumber(line); n == 0 || n == len(line) || line[n] != '-' {
		return m, false
	}
	line = line[n+1:]
	if m.end, n = hexNumber(line); n == 0 || n == len(line) || line[n] != ' ' {
		return m, false
	}
	field := func() (f []byte) {
		line = bytes.TrimLeft(line, " ")
		f, line, _ = bytes.Cut(line, []byte{' '})
		return f
	}
	line = line[n:]
	m.perms = field()
	field() // offset
	field() // device
	inode := field()
	m.file = len(inode) > 0 && !bytes.Equal(inode, []byte{'0'})
	m.path = bytes.TrimLeft(line, " ")
	return m, len(m.perms) == 4 && len(inode) > 0
}

// hexNumber is the number that b begins with, and how many digits it has.
func hexNumber(b []byte) (v uint64, n int) {
	for ; n < len(b); n++ {
		switch c := b[n]; {
		case '0' <= c && c <= '9':
			v = v<<4 | uint64(c-'0')
		case 'a' <= c && c <= 'f':
			v = v<<4 | uint64(c-'a'+10)
		default:
			return v, n
		}
	}
	return v, n
}
