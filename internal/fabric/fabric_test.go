// SPDX-License-Identifier: Apache-2.0

package fabric

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sort"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to make network namespaces")
	}
	if err := CheckTUN(); err != nil {
		t.Skip(err)
	}
}

func inNS(t testing.TB, fn func() error) {
	t.Helper()
	needRoot(t)
	if err := WithNS(fn); err != nil {
		t.Fatal(err)
	}
}

func links(t testing.TB) string {
	t.Helper()
	ls, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, l := range ls {
		names = append(names, l.Attrs().Name)
	}
	sort.Strings(names)
	return strings.Join(names, " ")
}

func tunFDs(t testing.TB) (n int) {
	t.Helper()
	es, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range es {
		switch l, _ := os.Readlink("/proc/self/fd/" + e.Name()); {
		case l == tunPath, strings.HasPrefix(l, "net:["):
			n++
		}
	}
	return n
}

func sysctl(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile("/proc/sys/net/ipv6/conf/" + path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

func TestMakesAndRemoves(t *testing.T) {
	inNS(t, func() error {
		before, fds := links(t), tunFDs(t)
		f, err := New(Config{})
		if err != nil {
			return err
		}
		var ports []Port
		for i := range 3 {
			p, err := f.AddPort(i)
			if err != nil {
				return err
			}
			ports = append(ports, p)
		}
		if got := links(t); got != before+" tv0 tv0p0 tv0p1 tv0p2" {
			t.Errorf("links %q", got)
		}
		want := Port{Index: 1, Name: "tv0p1", MAC: [6]byte{2, 't', 'v', 0, 0, 2}, MTU: DefaultMTU,
			V4: netip.MustParsePrefix("10.91.0.2/24"), V6: netip.MustParsePrefix("fd91::2/64")}
		if ports[1] != want {
			t.Errorf("%+v, want %+v", ports[1], want)
		}
		br, err := netlink.LinkByName("tv0")
		if err != nil {
			return err
		}
		b := br.(*netlink.Bridge)
		if b.MTU != DefaultMTU || b.Attrs().Flags&1 == 0 || b.MulticastSnooping == nil || *b.MulticastSnooping {
			t.Errorf("bridge: %+v", b)
		}
		for _, f := range []string{"forward_delay", "stp_state"} {
			v, err := bridgeSysfs("tv0", f)
			if err != nil {
				return err
			}
			if v != "0" {
				t.Errorf("%s is %s", f, v)
			}
		}
		for _, p := range ports {
			l, err := netlink.LinkByName(p.Name)
			if err != nil {
				return err
			}
			a := l.Attrs()
			tt := l.(*netlink.Tuntap)
			if a.MTU != DefaultMTU || a.TxQLen != DefaultTxQueueLen || a.MasterIndex != b.Index || a.Flags&1 == 0 || tt.NonPersist || tt.Mode != netlink.TUNTAP_MODE_TAP {
				t.Errorf("%s: %+v", p.Name, tt)
			}
			qs, err := netlink.QdiscList(l)
			if err != nil {
				return err
			}
			if len(qs) != 1 || qs[0].Type() != "noqueue" {
				t.Errorf("%s: qdiscs %v", p.Name, qs)
			}
			if a.HardwareAddr.String() == fmt.Sprintf("%x", p.MAC) {
				t.Error("the netdev has the engine's MAC")
			}
		}
		// Nobody has an IPv6 address, nor will.
		for _, name := range []string{"tv0", "tv0p0"} {
			if sysctl(t, name+"/disable_ipv6") != "1" {
				t.Errorf("%s takes part in IPv6", name)
			}
		}
		as, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		for _, a := range as {
			if !a.IP.IsLoopback() {
				t.Errorf("address %v", a)
			}
		}
		if err := f.RemovePort(1); err != nil {
			t.Error(err)
		}
		if err := f.RemovePort(1); err == nil {
			t.Error("removed twice")
		}
		if got := links(t); got != before+" tv0 tv0p0 tv0p2" {
			t.Errorf("links %q", got)
		}
		if _, err := f.AddPort(1); err != nil {
			t.Error("port 1 again:", err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
		if err := f.Close(); err != nil {
			t.Error("second Close:", err)
		}
		if got := links(t); got != before {
			t.Errorf("left: %q, before %q", got, before)
		}
		if n := tunFDs(t); n != fds {
			t.Errorf("%d descriptors left", n-fds)
		}
		if _, err := f.AddPort(0); err == nil {
			t.Error("a port on a closed fabric")
		}
		if _, _, err := f.HostAddr(); err == nil {
			t.Error("addresses for a closed fabric")
		}
		return nil
	})
}

// bridgeSysfs reads a bridge attribute from a sysfs of this namespace: the one
// mounted shows another's.
func bridgeSysfs(bridge, file string) (string, error) {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return "", err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return "", err
	}
	if err := unix.Mount("sysfs", "/sys", "sysfs", 0, ""); err != nil {
		return "", err
	}
	defer unix.Unmount("/sys", 0)
	b, err := os.ReadFile("/sys/class/net/" + bridge + "/bridge/" + file)
	return strings.TrimSpace(string(b)), err
}

func TestConfigTaken(t *testing.T) {
	inNS(t, func() error {
		f, err := New(Config{Name: "my", MTU: 4200, TxQueueLen: 77, Owner: 1234, Group: 99, MultiQueue: true,
			V4: netip.MustParsePrefix("10.1.2.99/29"), V6: netip.MustParsePrefix("fd01::99/112")})
		if err != nil {
			return err
		}
		defer f.Close()
		if f.Name() != "my" || f.MaxPorts() != 5 {
			t.Errorf("%s, %d ports", f.Name(), f.MaxPorts())
		}
		p, err := f.AddPort(4)
		if err != nil {
			return err
		}
		if p.Name != "myp4" || p.V4.String() != "10.1.2.101/29" || p.V6.String() != "fd01::5/112" || p.MTU != 4200 {
			t.Errorf("%+v", p)
		}
		l, err := netlink.LinkByName("myp4")
		if err != nil {
			return err
		}
		if tt := l.(*netlink.Tuntap); tt.Owner != 1234 || tt.Group != 99 || tt.Attrs().MTU != 4200 || tt.Attrs().TxQLen != 77 || tt.Flags&netlink.TUNTAP_MULTI_QUEUE == 0 {
			t.Errorf("%+v", tt)
		}
		for _, i := range []int{-1, 5} {
			if _, err := f.AddPort(i); err == nil {
				t.Errorf("port %d", i)
			}
		}
		v4, v6, err := f.HostAddr()
		if err != nil {
			return err
		}
		if v4.String() != "10.1.2.102/29" || v6.String() != "fd01::fffe/112" {
			t.Errorf("%v %v", v4, v6)
		}
		return nil
	})
}

func TestBadConfig(t *testing.T) {
	for _, c := range []struct {
		cfg  Config
		word string
	}{
		{Config{Name: "twelve-bytes"}, "at most 11"},
		{Config{MTU: 1279}, "1280"},
		{Config{MTU: 65522}, "65521"},
		{Config{TxQueueLen: -1}, "queue"},
		{Config{V4: netip.MustParsePrefix("10.0.0.0/30")}, "IPv4"},
		{Config{V4: netip.MustParsePrefix("fd00::/64")}, "IPv4"},
		{Config{V6: netip.MustParsePrefix("fd00::/120")}, "IPv6"},
		{Config{V6: netip.MustParsePrefix("10.0.0.0/8")}, "IPv6"},
	} {
		if f, err := New(c.cfg); err == nil || !strings.Contains(err.Error(), c.word) {
			t.Errorf("%+v: %v, %v", c.cfg, f, err)
		}
	}
}

func TestHostAddr(t *testing.T) {
	inNS(t, func() error {
		f, err := New(Config{})
		if err != nil {
			return err
		}
		defer f.Close()
		for range 2 {
			v4, v6, err := f.HostAddr()
			if err != nil {
				return err
			}
			if v4.String() != "10.91.0.254/24" || v6.String() != "fd91::fffe/64" {
				t.Errorf("%v, %v", v4, v6)
			}
		}
		as, err := netlink.AddrList(f.bridge, netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		found := map[string]bool{}
		for _, a := range as {
			found[a.IPNet.String()] = true
			if a.Flags&unix.IFA_F_TENTATIVE != 0 {
				t.Errorf("%v is not usable yet", a)
			}
		}
		if !found["10.91.0.254/24"] || !found["fd91::fffe/64"] {
			t.Errorf("%v", as)
		}
		return nil
	})
}

// What is there already is neither taken over nor removed.
func TestExists(t *testing.T) {
	inNS(t, func() error {
		f, err := New(Config{})
		if err != nil {
			return err
		}
		defer f.Close()
		if _, err := New(Config{}); !errors.Is(err, ErrExists) || !strings.Contains(err.Error(), "tv0") {
			t.Errorf("%v", err)
		}
		if _, err := f.AddPort(0); err != nil {
			return err
		}
		if _, err := f.AddPort(0); !errors.Is(err, ErrExists) {
			t.Errorf("%v", err)
		}
		if err := netlink.LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "tv0p1"}}); err != nil {
			// No dummy driver: another bridge will do.
			if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "tv0p1"}}); err != nil {
				return err
			}
		}
		if _, err := f.AddPort(1); !errors.Is(err, ErrExists) {
			t.Errorf("%v", err)
		}
		if got := links(t); !strings.HasSuffix(got, "tv0 tv0p0 tv0p1") {
			t.Errorf("links %q", got)
		}
		return nil
	})
}

// A fabric is used from goroutines that are in another namespace, or in none in
// particular; and ports taken away by someone else do not disturb Close.
func TestFromElsewhere(t *testing.T) {
	var f *Fabric
	inNS(t, func() (err error) {
		f, err = New(Config{})
		return err
	})
	here := links(t)
	for i := range 2 {
		if _, err := f.AddPort(i); err != nil {
			t.Fatal(err)
		}
	}
	if err := WithNS(func() error { _, err := f.AddPort(2); return err }); err != nil {
		t.Fatal(err)
	}
	if _, _, err := f.HostAddr(); err != nil {
		t.Fatal(err)
	}
	if got := links(t); got != here {
		t.Errorf("links of this namespace: %q, before %q", got, here)
	}
	ls, err := f.nl.LinkList()
	if err != nil || len(ls) < 5 {
		t.Errorf("%d links in the fabric's namespace, %v", len(ls), err)
	}
	if err := f.nl.LinkDel(f.ports[1]); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// Without privileges: what is missing is said, and nothing is left.
func TestPermission(t *testing.T) {
	inNS(t, func() error {
		f, err := New(Config{})
		if err != nil {
			return err
		}
		defer f.Close()
		if err := asUser(); err != nil {
			return err
		}
		if _, err := New(Config{Name: "other"}); !errors.Is(err, ErrPermission) || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
			t.Errorf("%v", err)
		}
		return nil
	})
	if err := WithNS(func() error {
		if err := asUser(); err != nil {
			return err
		}
		err := WithNS(func() error { return nil })
		t.Log("a new thread is root again:", err)
		if err := unix.Unshare(unix.CLONE_NEWNET); err == nil {
			t.Error("unshare as an ordinary user")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// asUser makes this thread that of an ordinary user, for good.
func asUser() error {
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, 65534, 65534, 65534); errno != 0 {
		return errno
	}
	return nil
}

func TestWithNS(t *testing.T) {
	needRoot(t)
	outer, err := netnsInode()
	if err != nil {
		t.Fatal(err)
	}
	want := errors.New("mine")
	if err := WithNS(func() error {
		inner, err := netnsInode()
		if err != nil || inner == outer {
			t.Errorf("namespace %s, outside %s, %v", inner, outer, err)
		}
		if got := links(t); strings.Contains(got, "eth") || !strings.Contains(got, "lo") {
			t.Errorf("links %q", got)
		}
		return want
	}); err != want {
		t.Errorf("%v", err)
	}
	if now, err := netnsInode(); err != nil || now != outer {
		t.Errorf("in %s afterwards, before %s, %v", now, outer, err)
	}
}
