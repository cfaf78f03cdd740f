// SPDX-License-Identifier: Apache-2.0

package tap_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/internal/fabric"
	"github.com/tapverbs/tapverbs/tap"
)

func both(t *testing.T, fn func(t *testing.T, plain bool)) {
	t.Run("plain", func(t *testing.T) { fn(t, true) })
	t.Run("vnet", func(t *testing.T) { fn(t, false) })
}

// tunFDs counts the process's descriptors of /dev/net/tun.
func tunFDs(t *testing.T) (n int) {
	t.Helper()
	es, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range es {
		if l, _ := os.Readlink("/proc/self/fd/" + e.Name()); l == "/dev/net/tun" {
			n++
		}
	}
	return n
}

func TestDescriptorFlags(t *testing.T) {
	both(t, func(t *testing.T, plain bool) {
		_, ds := onBridge(t, fabric.Config{}, tap.Config{Plain: plain})
		if fl, err := unix.FcntlInt(uintptr(ds[0].FD()), unix.F_GETFD, 0); err != nil || fl&unix.FD_CLOEXEC == 0 {
			t.Errorf("not close-on-exec: %#x, %v", fl, err)
		}
		if fl, err := unix.FcntlInt(uintptr(ds[0].FD()), unix.F_GETFL, 0); err != nil || fl&unix.O_NONBLOCK == 0 {
			t.Errorf("blocking: %#x, %v", fl, err)
		}
	})
}

// From Linux 6.2 on the kernel has USO; not to get it there is a fault of ours.
func TestNegotiated(t *testing.T) {
	_, ds := onBridge(t, fabric.Config{}, tap.Config{}, tap.Config{Plain: true}, tap.Config{Without: tap.USO4},
		tap.Config{Without: tap.CSUM})
	want := tap.VnetHdr | tap.CSUM
	if kernelAtLeast(t, 6, 2) {
		want |= tap.USO4 | tap.USO6
	}
	for i, w := range []tap.Offload{want, 0, tap.VnetHdr | tap.CSUM, tap.VnetHdr} {
		if got := ds[i].Offloads(); got != w {
			t.Errorf("device %d: %v, want %v", i, got, w)
		}
	}
}

func kernelAtLeast(t *testing.T, major, minor int) bool {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	var a, b int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &a, &b); err != nil {
		t.Fatal(err)
	}
	return a > major || a == major && b >= minor
}

func TestBusy(t *testing.T) {
	both(t, func(t *testing.T, plain bool) {
		inNS(t, func() error {
			before := tunFDs(t)
			a, err := tap.Open(tap.Config{Name: "busy0", Plain: !plain})
			if err != nil {
				return err
			}
			for range 3 {
				_, err = tap.Open(tap.Config{Name: "busy0", Plain: plain})
				if !errors.Is(err, tap.ErrBusy) || !strings.Contains(err.Error(), "busy0") {
					t.Errorf("%v", err)
				}
			}
			if n := tunFDs(t); n != before+1 {
				t.Errorf("%d descriptors more, want 1", n-before)
			}
			if err := a.Close(); err != nil {
				return err
			}
			// Close freed it.
			b, err := tap.Open(tap.Config{Name: "busy0", Plain: plain})
			if err != nil {
				return err
			}
			return b.Close()
		})
	})
}

func TestBadNames(t *testing.T) {
	both(t, func(t *testing.T, plain bool) {
		inNS(t, func() error {
			before := tunFDs(t)
			for _, name := range []string{"sixteen-bytes-xx", "a/b", "a b", "a:b", ".", "..", "a\x00b", "a\n"} {
				if d, err := tap.Open(tap.Config{Name: name, Plain: plain}); !errors.Is(err, tap.ErrName) {
					t.Errorf("%q: %v, %v", name, d, err)
				}
			}
			if d, err := tap.Open(tap.Config{Name: "lo", Plain: plain}); !errors.Is(err, tap.ErrNotTAP) {
				t.Errorf("lo: %v, %v", d, err)
			}
			if n := tunFDs(t); n != before {
				t.Errorf("%d descriptors left", n-before)
			}
			d, err := tap.Open(tap.Config{Name: "fifteen-bytes-x", Plain: plain})
			if err != nil {
				return err
			}
			defer d.Close()
			e, err := tap.Open(tap.Config{Name: "any%d", Plain: plain})
			if err != nil {
				return err
			}
			defer e.Close()
			g, err := tap.Open(tap.Config{Plain: plain})
			if err != nil {
				return err
			}
			defer g.Close()
			if d.Name() != "fifteen-bytes-x" || e.Name() != "any0" || g.Name() != "tap0" {
				t.Errorf("names %q %q %q", d.Name(), e.Name(), g.Name())
			}
			return nil
		})
	})
}

// A TAP of the process's own disappears on Close, a persistent one stays, however it
// was opened: water clears the flag unless told otherwise.
func TestPersistence(t *testing.T) {
	both(t, func(t *testing.T, plain bool) {
		inNS(t, func() error {
			before := tunFDs(t)
			d, err := tap.Open(tap.Config{Name: "mine0", Plain: plain, MTU: 4200})
			if err != nil {
				return err
			}
			if d.MTU() != 4200 {
				t.Errorf("MTU %d", d.MTU())
			}
			d.Close()
			if err := d.Close(); err != nil {
				t.Error("second Close:", err)
			}
			if d.FD() != -1 {
				t.Error("descriptor after Close")
			}
			if _, err := netlink.LinkByName("mine0"); err == nil {
				t.Error("mine0 is left")
			}
			f, err := fabric.New(fabric.Config{})
			if err != nil {
				return err
			}
			defer f.Close()
			p, err := f.AddPort(0)
			if err != nil {
				return err
			}
			for range 2 {
				d, err := tap.Open(tap.Config{Name: p.Name, Plain: plain, MTU: p.MTU})
				if err != nil {
					return err
				}
				d.Close()
				if _, err := netlink.LinkByName(p.Name); err != nil {
					t.Errorf("%s is gone: %v", p.Name, err)
				}
			}
			if n := tunFDs(t); n != before {
				t.Errorf("%d descriptors left", n-before)
			}
			return nil
		})
	})
}

func TestMTUFollowsNetdev(t *testing.T) {
	inNS(t, func() error {
		if _, err := tap.Open(tap.Config{Name: "m0", MTU: 1 << 20}); err == nil || !strings.Contains(err.Error(), "65521") {
			t.Errorf("%v", err)
		}
		d, err := tap.OpenVnet("m0")
		if err != nil {
			return err
		}
		defer d.Close()
		l, err := netlink.LinkByName("m0")
		if err != nil {
			return err
		}
		for _, mtu := range []int{1500, 4200, 65521} {
			if err := netlink.LinkSetMTU(l, mtu); err != nil {
				return err
			}
			if d.MTU() != mtu {
				t.Errorf("MTU %d, want %d", d.MTU(), mtu)
			}
		}
		return nil
	})
}

func TestGone(t *testing.T) {
	both(t, func(t *testing.T, plain bool) {
		f, ds := onBridge(t, fabric.Config{}, tap.Config{Plain: plain}, tap.Config{Plain: plain})
		if err := f.RemovePort(0); err != nil {
			t.Fatal(err)
		}
		if ev := await(t, ds[0]); ev&unix.POLLERR == 0 {
			t.Errorf("poll says %#x", ev)
		}
		if n, err := ds[0].ReadBatch(buffers(1, 100)); n != 0 || !errors.Is(err, tap.ErrGone) || errors.Is(err, tap.ErrDown) {
			t.Errorf("read: %d, %v", n, err)
		}
		if n, err := ds[0].WriteBatch([]tap.Frame{{B: frame(0, 1, 60, 0)}}); n != 0 || !errors.Is(err, tap.ErrGone) || errors.Is(err, tap.ErrDown) {
			t.Errorf("write: %d, %v", n, err)
		}
		if ds[0].MTU() != 0 {
			t.Errorf("MTU %d", ds[0].MTU())
		}
		// The whole fabric away, under the other port.
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := ds[1].ReadBatch(buffers(1, 100)); !errors.Is(err, tap.ErrGone) {
			t.Errorf("read: %v", err)
		}
		if err := ds[1].Close(); err != nil {
			t.Error(err)
		}
		if _, err := ds[1].ReadBatch(buffers(1, 100)); !errors.Is(err, tap.ErrGone) {
			t.Errorf("read after Close: %v", err)
		}
	})
}

func TestDown(t *testing.T) {
	both(t, func(t *testing.T, plain bool) {
		inNS(t, func() error {
			d, err := tap.Open(tap.Config{Name: "d0", Plain: plain})
			if err != nil {
				return err
			}
			defer d.Close()
			out := []tap.Frame{{B: frame(0, 1, 60, 0)}}
			if n, err := d.WriteBatch(out); n != 0 || !errors.Is(err, tap.ErrDown) || !errors.Is(err, tap.ErrGone) {
				t.Errorf("%d, %v", n, err)
			}
			if n, err := d.ReadBatch(buffers(1, 100)); n != 0 || err != nil {
				t.Errorf("%d, %v", n, err)
			}
			l, err := netlink.LinkByName("d0")
			if err != nil {
				return err
			}
			if err := netlink.LinkSetUp(l); err != nil {
				return err
			}
			if n, err := d.WriteBatch(out); n != 1 || err != nil {
				t.Errorf("after up: %d, %v", n, err)
			}
			return nil
		})
	})
}

func TestQueues(t *testing.T) {
	both(t, func(t *testing.T, plain bool) {
		inNS(t, func() error {
			ds, err := tap.OpenQueues(tap.Config{Name: "mq%d", Plain: plain, Queues: 3, MTU: 2000})
			if err != nil {
				return err
			}
			for _, d := range ds {
				defer d.Close()
				if d.Name() != "mq0" || d.MTU() != 2000 {
					t.Errorf("%s, MTU %d", d.Name(), d.MTU())
				}
			}
			if len(ds) != 3 {
				t.Errorf("%d queues", len(ds))
			}
			if _, err := tap.Open(tap.Config{Name: "mq0", Plain: plain}); !errors.Is(err, tap.ErrNotTAP) {
				t.Errorf("single queue of a multi-queue TAP: %v", err)
			}
			// Each queue can send; any may receive.
			l, err := netlink.LinkByName("mq0")
			if err != nil {
				return err
			}
			if err := netlink.LinkSetUp(l); err != nil {
				return err
			}
			for _, d := range ds {
				if n, err := d.WriteBatch([]tap.Frame{{B: frame(0, 1, 60, 0)}}); n != 1 || err != nil {
					t.Errorf("%d, %v", n, err)
				}
			}
			return nil
		})
	})
}

func TestFromFD(t *testing.T) {
	both(t, func(t *testing.T, plain bool) {
		inNS(t, func() error {
			f, err := fabric.New(fabric.Config{})
			if err != nil {
				return err
			}
			defer f.Close()
			var ds []tap.Device
			for i := range 2 {
				p, err := f.AddPort(i)
				if err != nil {
					return err
				}
				d, err := tap.Open(tap.Config{Name: p.Name, Plain: plain})
				if err != nil {
					return err
				}
				defer d.Close()
				ds = append(ds, d)
			}
			dup := func() int {
				fd, err := unix.Dup(ds[0].FD())
				if err != nil {
					t.Fatal(err)
				}
				return fd
			}
			d, err := tap.FromFD(dup(), 0)
			if err != nil {
				return err
			}
			defer d.Close()
			if d.Name() != ds[0].Name() || d.MTU() != fabric.DefaultMTU || d.Offloads() != ds[0].Offloads() {
				t.Errorf("%s, MTU %d, %v", d.Name(), d.MTU(), d.Offloads())
			}
			b := frame(0, 1, 500, 7)
			if n, err := d.WriteBatch([]tap.Frame{{B: b}}); n != 1 || err != nil {
				t.Errorf("%d, %v", n, err)
			}
			if got := readAll(t, ds[1], 1); !bytes.Equal(got[0].B, b) {
				t.Error("frame differs")
			}
			// From another namespace the MTU cannot be asked for.
			fd := dup()
			if err := fabric.WithNS(func() error {
				if d, err := tap.FromFD(fd, 0); err == nil || !strings.Contains(err.Error(), "MTU must be given") {
					t.Errorf("%v, %v", d, err)
				}
				d, err := tap.FromFD(fd, 4200)
				if err != nil {
					return err
				}
				if d.MTU() != 4200 {
					t.Errorf("MTU %d", d.MTU())
				}
				return d.Close()
			}); err != nil {
				return err
			}
			var p [2]int
			if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
				return err
			}
			defer unix.Close(p[0])
			defer unix.Close(p[1])
			if _, err := tap.FromFD(p[0], 0); !errors.Is(err, tap.ErrNotTAP) {
				t.Errorf("a pipe: %v", err)
			}
			return nil
		})
	})
}

// As another user: whether that fails at /dev/net/tun (0600 on some systems) or at
// the TAP, it is the permission that is missing.
func TestOrdinaryUser(t *testing.T) {
	both(t, func(t *testing.T, plain bool) {
		inNS(t, func() error {
			before := tunFDs(t)
			// This thread only; it ends with the function.
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, 65534, 65534, 65534); errno != 0 {
				return errno
			}
			_, err := tap.Open(tap.Config{Name: "user0", Plain: plain})
			if !errors.Is(err, tap.ErrPermission) {
				t.Errorf("%v", err)
			}
			t.Log(err)
			if n := tunFDs(t); n != before {
				t.Errorf("%d descriptors left", n-before)
			}
			return nil
		})
	})
}

func TestNoTUN(t *testing.T) {
	both(t, func(t *testing.T, plain bool) {
		inNS(t, func() error {
			// A /dev/net of this thread's own, with nothing in it.
			if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
				return err
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return err
			}
			if err := unix.Mount("none", "/dev/net", "tmpfs", 0, ""); err != nil {
				return err
			}
			_, err := tap.Open(tap.Config{Name: "no0", Plain: plain})
			if !errors.Is(err, tap.ErrNoTUN) || !strings.Contains(err.Error(), "modprobe tun") {
				t.Errorf("%v", err)
			}
			t.Log(err)
			return nil
		})
	})
}
