// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// memcg is a memory cgroup with a limit, cgroups(7) of version 1 or 2, and compressed
// swap that is made for it. Both go with the test, however it ends: a shell that waits
// for the end of a pipe from the test takes them away.
type memcg struct {
	dir   string // of the cgroup
	limit string // the file with the limit
	usage string // and with what is used
	zram  string // the device
	guard *exec.Cmd
	pipe  io.Closer
}

// guardScript ends what runs in cgroup $1 and takes it and the zram device $2 away, when
// its input ends. Either may be empty.
const guardScript = `
cat >/dev/null
if [ -n "$1" ]; then
	for i in $(seq 200); do
		kill -9 $(cat "$1/cgroup.procs") 2>/dev/null
		rmdir "$1" 2>/dev/null && break
		sleep 0.05
	done
fi
if [ -n "$2" ]; then
	grep -q "^/dev/zram$2 " /proc/swaps && swapoff "/dev/zram$2"
	echo 1 >"/sys/block/zram$2/reset"
	echo "$2" >/sys/class/zram-control/hot_remove
fi
`

// newMemcg makes one that may hold limit bytes, and as many in swap as swap says. It
// skips the test where there are no cgroups or no zram.
func newMemcg(t *testing.T, limit, swap uint64) *memcg {
	t.Helper()
	g := new(memcg)
	if err := g.group(limit); err != nil {
		t.Skipf("no memory cgroup: %v", err)
	}
	id, err := g.compressed(swap)
	if e := g.watch(id); e != nil {
		t.Fatal(e)
	}
	t.Cleanup(func() {
		if err := errors.Join(g.pipe.Close(), g.guard.Wait()); err != nil {
			t.Errorf("taking cgroup %s and %s away: %v", g.dir, g.zram, err)
		}
		if _, err := os.Stat(g.dir); err == nil {
			t.Errorf("%s is still there", g.dir)
		}
	})
	if err != nil {
		t.Skipf("no compressed swap: %v", err)
	}
	return g
}

// group makes the cgroup below the one that this process is in.
func (g *memcg) group(limit uint64) error {
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return err
	}
	name := fmt.Sprintf("tapverbs-%d", os.Getpid())
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		switch {
		case f[1] == "memory":
			g.dir = filepath.Join("/sys/fs/cgroup/memory", f[2], name)
			g.limit, g.usage = "memory.limit_in_bytes", "memory.max_usage_in_bytes"
		case f[1] == "" && g.dir == "":
			g.dir = filepath.Join("/sys/fs/cgroup", f[2], name)
			g.limit, g.usage = "memory.max", "memory.peak"
		}
	}
	if g.dir == "" {
		return errors.New("/proc/self/cgroup names none")
	}
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(g.dir, g.limit), fmt.Append(nil, limit), 0o600); err != nil {
		return errors.Join(err, os.Remove(g.dir))
	}
	return nil
}

// compressed makes a zram device and swaps to it, with the least priority of all.
func (g *memcg) compressed(n uint64) (id string, err error) {
	b, err := os.ReadFile("/sys/class/zram-control/hot_add")
	if err != nil {
		return "", err
	}
	id = strings.TrimSpace(string(b))
	g.zram = "/dev/zram" + id
	if err := os.WriteFile("/sys/block/zram"+id+"/disksize", fmt.Append(nil, n), 0o600); err != nil {
		return id, err
	}
	if err := makeSwap(g.zram, n); err != nil {
		return id, err
	}
	path, err := unix.BytePtrFromString(g.zram)
	if err != nil {
		return id, err
	}
	if _, _, e := unix.Syscall(unix.SYS_SWAPON, uintptr(unsafe.Pointer(path)), 0, 0); e != 0 {
		return id, fmt.Errorf("swapon %s: %w", g.zram, e)
	}
	return id, nil
}

// makeSwap writes the header of a swap area of n bytes (mkswap(8)).
func makeSwap(dev string, n uint64) error {
	page := make([]byte, os.Getpagesize())
	binary.NativeEndian.PutUint32(page[1024:], 1)                             // version
	binary.NativeEndian.PutUint32(page[1028:], uint32(n/uint64(len(page))-1)) // last page
	copy(page[len(page)-10:], "SWAPSPACE2")
	f, err := os.OpenFile(dev, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(page, 0)
	return errors.Join(err, f.Close())
}

// watch starts the shell that cleans up.
func (g *memcg) watch(zram string) error {
	g.guard = exec.Command("/bin/sh", "-c", guardScript, "guard", g.dir, zram)
	g.guard.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // no Ctrl-C for it
	g.guard.Stderr = os.Stderr
	in, err := g.guard.StdinPipe()
	if err != nil {
		return err
	}
	g.pipe = in
	return g.guard.Start()
}

// peak is the most that the group has held, in bytes.
func (g *memcg) peak() (n uint64, err error) {
	b, err := os.ReadFile(filepath.Join(g.dir, g.usage))
	if err != nil {
		return 0, err
	}
	_, err = fmt.Sscan(string(b), &n)
	return n, err
}
