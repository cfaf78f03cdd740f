// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

// Regions far larger than the memory that the process may use.

// bigRun says what one of them is like.
type bigRun struct {
	Bytes  uint64 // of the region
	Limit  uint64 // of memory
	Cgroup string // the kernel keeps the limit, for the processes of this group
	Budget bool   // the library does
	Pin    bool   // is tried, and refused
}

// bigSlack is what both engines, the Go runtime and the test take in bytes, at most, and
// bigBooks the share of the region's size that the page table and the store's index do.
const (
	bigSlack = 48 << 20
	bigBooks = 1. / 256
)

// bigSize is the region's size in bytes and the limit: 4 GiB in 256 MiB, or a part of it
// where that would take long.
func bigSize(long bool) (n, limit uint64) {
	switch {
	case testing.Short() || raceDetector:
		return 256 << 20, 32 << 20
	case long && os.Getenv("TAPVERBS_LONG") == "":
		return 1 << 30, 64 << 20
	}
	return 4 << 30, 256 << 20
}

// TestBigRegionUnderMemcg: a peer writes all of 4 GiB, in a process that the kernel holds
// to 256 MiB with compressed swap; nothing is pinned, so nothing stands in its way.
func TestBigRegionUnderMemcg(t *testing.T) {
	n, limit := bigSize(false)
	g := newMemcg(t, limit, n+n/4)
	runBig(t, bigRun{Bytes: n, Limit: limit, Cgroup: g.dir})
	// The kernel may charge a few pages more before it looks.
	if peak, err := g.peak(); err != nil || peak > limit+1<<20 || peak < limit/2 {
		t.Errorf("the group has held %d bytes at most, its limit is %d (%v)", peak, limit, err)
	}
}

// TestBigRegionInBudget: the same, in a process with as much memory as it likes and a
// budget: what is beyond goes to the store, a file, and comes back. With TAPVERBS_LONG=1
// these are 4 GiB in 256 MiB, too, which takes half a minute or a whole one.
func TestBigRegionInBudget(t *testing.T) {
	n, limit := bigSize(true)
	runBig(t, bigRun{Bytes: n, Limit: limit, Budget: true})
}

// TestBigRegionPinned: the pinned mode is refused under the same limit.
func TestBigRegionPinned(t *testing.T) {
	n, limit := bigSize(false)
	runBig(t, bigRun{Bytes: n, Limit: limit, Pin: true})
}

func runBig(t *testing.T, r bigRun) {
	t.Helper()
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	runScenario(t, 4*hang, plainStart, "big", runEnv+"="+string(b))
}

func big() error {
	var r bigRun
	if err := json.Unmarshal([]byte(os.Getenv(runEnv)), &r); err != nil {
		return err
	}
	if r.Cgroup != "" {
		if err := os.WriteFile(filepath.Join(r.Cgroup, "cgroup.procs"), fmt.Append(nil, os.Getpid()), 0o600); err != nil {
			return err
		}
	}
	mem, err := mr.Alloc(int(r.Bytes))
	if err != nil {
		return err
	}
	c, err := newCable(1)
	if err != nil {
		return err
	}
	if r.Pin {
		return errors.Join(refused(c, mem, r.Limit), c.close())
	}
	if r.Budget {
		if err := c.dev[1].Space().SetBudget(r.Limit); err != nil {
			return err
		}
	}
	begun := time.Now()
	region, err := c.pd[1].RegMR(mem.Bytes(), allRights)
	if err != nil {
		return err
	}
	if region.Paging() != mr.UserFault {
		return fmt.Errorf("the region is paged by %v", region.Paging())
	}
	registered := time.Since(begun)
	l := c.lines[0]
	src := words(l.data.Bytes())
	for at := uint64(0); at < r.Bytes; at += lineData {
		stampPages(src, at/page)
		if wc, err := l.write(region, mem.Addr()+uintptr(at), lineData); err != nil || wc.Status != qp.WCSuccess {
			return fmt.Errorf("WRITE at %d: %w, %+v", at, err, wc)
		}
	}
	written := time.Since(begun)
	// The application looks at all of it, page by page.
	want := make([]byte, page)
	for p := range r.Bytes / page {
		stampPages(words(want), p)
		if got := mem.Bytes()[p*page : (p+1)*page]; !bytes.Equal(got, want) {
			return fmt.Errorf("page %d has wrong data at byte %d", p, differ(got, want))
		}
	}
	st, err := memoryStatus()
	if err != nil {
		return err
	}
	use, err := region.Usage()
	if err != nil {
		return err
	}
	fmt.Printf("%d MiB registered in %v, written in %.1f s, verified in %.1f s; %v; %+v\n", r.Bytes>>20, registered, written.Seconds(),
		(time.Since(begun) - written).Seconds(), st, use)
	slack := uint64(bigSlack)
	if raceDetector {
		slack *= 2 // it has memory of its own for all that is touched
	}
	switch {
	case st["VmHWM"] > r.Limit+slack+uint64(bigBooks*float64(r.Bytes)):
		return fmt.Errorf("%d bytes were resident, the limit is %d", st["VmHWM"], r.Limit)
	case st["VmPin"]+st["VmLck"] > 0:
		return fmt.Errorf("%d bytes are pinned", st["VmPin"]+st["VmLck"])
	case r.Cgroup != "" && st["VmSwap"]+r.Limit < r.Bytes:
		return fmt.Errorf("%d bytes are in the swap, of %d", st["VmSwap"], r.Bytes)
	case r.Budget && (use.Evictions < (r.Bytes-r.Limit)/page || use.Present+use.Limbo > r.Limit):
		return errors.New("the budget was not kept")
	case region.Stats().PageFaults < r.Bytes/page:
		return fmt.Errorf("%d page faults for %d pages", region.Stats().PageFaults, r.Bytes/page)
	}
	return errors.Join(region.Dereg(), c.close(), mem.Close())
}

// stampPages makes the content of pages, from number p on: each word depends on its
// page and place, and a page can be compressed.
func stampPages(b []uint64, p uint64) {
	for ; len(b) > 0; b, p = b[page/8:], p+1 {
		first := (p + 1) * 0x9e3779b97f4a7c15
		for i := range b[:page/8] {
			b[i] = first + uint64(i%64)*0x0101_0101_0101
		}
	}
}

func words(b []byte) []uint64 { return unsafe.Slice((*uint64)(unsafe.Pointer(&b[0])), len(b)/8) }

// memoryStatus is what /proc/self/status says of memory, in bytes (proc(5)).
func memoryStatus() (map[string]uint64, error) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return nil, err
	}
	out := map[string]uint64{}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) != 3 || f[2] != "kB" {
			continue
		}
		n, err := strconv.ParseUint(f[1], 10, 64)
		if err != nil {
			return nil, err
		}
		switch name := strings.TrimSuffix(f[0], ":"); name {
		case "VmHWM", "VmRSS", "VmSwap", "VmPin", "VmLck":
			out[name] = n << 10
		}
	}
	return out, nil
}

// refused tries to pin memory over RLIMIT_MEMLOCK, which counts for those without
// CAP_IPC_LOCK.
func refused(c *cable, mem *mr.Memory, limit uint64) error {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim); err != nil {
		return err
	}
	limit = min(limit, lim.Max) // only some may raise it
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: limit, Max: lim.Max}); err != nil {
		return err
	}
	runtime.LockOSThread() // whose capabilities these are; it ends with the process
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&hdr, &caps[0]); err != nil {
		return err
	}
	caps[0].Effective &^= 1 << unix.CAP_IPC_LOCK
	if err := unix.Capset(&hdr, &caps[0]); err != nil {
		return err
	}
	pin := func(n uint64) (*provider.MR, error) {
		return c.pd[1].Register(provider.MRAttr{Addr: mem.Addr(), Length: n, Access: allRights, Pin: true})
	}
	if m, err := pin(uint64(len(mem.Bytes()))); !errors.Is(err, unix.ENOMEM) || !errors.Is(err, mr.ErrMemlock) {
		return fmt.Errorf("pinning %d bytes under a limit of %d: %v, %w", len(mem.Bytes()), limit, m, err)
	}
	if st, err := memoryStatus(); err != nil || st["VmLck"] != 0 {
		return fmt.Errorf("%d bytes are locked (%w)", st["VmLck"], err)
	}
	m, err := pin(limit / 2)
	if err != nil {
		return fmt.Errorf("pinning half of what is allowed: %w", err)
	}
	return m.Dereg()
}
