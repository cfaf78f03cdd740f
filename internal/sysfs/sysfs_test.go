// SPDX-License-Identifier: Apache-2.0

package sysfs

import (
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

var sample = Device{
	Name: "tapverbs0", Verbs: "uverbs0", GUID: 0x007476fffe000001, Firmware: "1.2", NetDev: "lo",
	GIDs: []netip.Addr{netip.MustParseAddr("fe80::74:76ff:fe00:1"), netip.MustParseAddr("10.91.0.1")},
	Live: map[string]string{"ports/1/state": "4: ACTIVE\n", "ports/1/counters/port_xmit_data": "0\n"},
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestTree compares with what the kernel shows of a RoCE device.
func TestTree(t *testing.T) {
	dir := t.TempDir()
	class, verbs := filepath.Join(dir, "infiniband"), filepath.Join(dir, "infiniband_verbs")
	if err := sample.build(class, verbs, "231:192"); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "net/lo"), 0o755); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"infiniband/tapverbs0/node_type":                       "1: CA\n",
		"infiniband/tapverbs0/node_guid":                       "0074:76ff:fe00:0001\n",
		"infiniband/tapverbs0/sys_image_guid":                  "0074:76ff:fe00:0001\n",
		"infiniband/tapverbs0/fw_ver":                          "1.2\n",
		"infiniband/tapverbs0/ports/1/state":                   "4: ACTIVE\n",
		"infiniband/tapverbs0/ports/1/rate":                    "40 Gb/sec (4X QDR)\n",
		"infiniband/tapverbs0/ports/1/cap_mask":                "0x04000000\n",
		"infiniband/tapverbs0/ports/1/link_layer":              "Ethernet\n",
		"infiniband/tapverbs0/ports/1/pkeys/0":                 "0xffff\n",
		"infiniband/tapverbs0/ports/1/gids/0":                  "fe80:0000:0000:0000:0074:76ff:fe00:0001\n",
		"infiniband/tapverbs0/ports/1/gids/1":                  "0000:0000:0000:0000:0000:ffff:0a5b:0001\n",
		"infiniband/tapverbs0/ports/1/gid_attrs/types/1":       "RoCE v2\n",
		"infiniband/tapverbs0/ports/1/gid_attrs/ndevs/1":       "lo\n",
		"infiniband/tapverbs0/ports/1/counters/port_xmit_data": "0\n",
		"infiniband/tapverbs0/device/numa_node":                "-1\n",
		"infiniband_verbs/abi_version":                         "6\n",
		"infiniband_verbs/uverbs0/ibdev":                       "tapverbs0\n",
		"infiniband_verbs/uverbs0/dev":                         "231:192\n",
		"infiniband_verbs/uverbs0/device/numa_node":            "-1\n",
	} {
		if got := read(t, filepath.Join(dir, path)); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
	for link, want := range map[string]string{
		"infiniband/tapverbs0/device/net/lo":                   "net/lo",
		"infiniband/tapverbs0/device/infiniband/tapverbs0":     "infiniband/tapverbs0",
		"infiniband/tapverbs0/device/infiniband_verbs/uverbs0": "infiniband_verbs/uverbs0",
		"infiniband_verbs/uverbs0/device":                      "infiniband/tapverbs0/device",
	} {
		got, err := filepath.EvalSymlinks(filepath.Join(dir, link))
		if err != nil || got != filepath.Join(dir, want) {
			t.Errorf("%s leads to %s, %v; want %s", link, got, err, want)
		}
	}
	// As many GIDs as there are, and nothing that could be taken for another.
	for _, d := range []string{"gids", "gid_attrs/types", "gid_attrs/ndevs"} {
		if e, err := os.ReadDir(filepath.Join(class, "tapverbs0/ports/1", d)); err != nil || len(e) != 2 {
			t.Errorf("%s has %d entries, %v", d, len(e), err)
		}
	}
}

func TestCPUMask(t *testing.T) {
	for list, want := range map[string]string{
		"0": "00000001", "0-3": "0000000f", "0-1,4": "00000013", "31": "80000000", "0,32-33": "00000003,00000001",
	} {
		if got, err := cpuMask(list); got != want || err != nil {
			t.Errorf("%s: %s, %v; want %s", list, got, err, want)
		}
	}
	for _, list := range []string{"", "x", "1-x", "0-99999"} {
		if got, err := cpuMask(list); err == nil {
			t.Errorf("%q: %s", list, got)
		}
	}
}

// inNamespaces calls fn on a thread with mount and network namespaces of its own.
func inNamespaces(t *testing.T, fn func() error) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread goes with them
		err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_NEWNET)
		if err == nil {
			err = fn()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func names(dir string) []string {
	entries, _ := os.ReadDir(dir)
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	slices.Sort(all)
	return all
}

// TestShow: the device is where programs look, everything else is where it was, and
// outside nothing has changed.
func TestShow(t *testing.T) {
	dirs := []string{"/sys", "/sys/class", "/dev", "/sys/fs", "/dev/pts"}
	before := map[string][]string{}
	for _, d := range dirs {
		before[d] = names(d)
	}
	cgroup := names("/sys/fs/cgroup")
	outer, err := Namespace()
	if err != nil {
		t.Fatal(err)
	}
	inNamespaces(t, func() error {
		ns, err := Namespace()
		if err != nil || !Inside(outer) {
			t.Errorf("namespace %s, %v; outside it is %s", ns, err, outer)
		}
		for _, no := range []string{"", "1", "x:1", outer + "x", ns} {
			if Inside(no) {
				t.Errorf("%q does not name another namespace", no)
			}
		}
		for range 2 { // once is enough, and twice does no harm
			if err := Prepare(true); err != nil {
				return err
			}
		}
		if err := Show(&sample); err != nil {
			return err
		}
		if got := names(ClassDir); !slices.Equal(got, []string{"tapverbs0"}) {
			t.Errorf("%s: %q", ClassDir, got)
		}
		if got := names(VerbsClassDir); !slices.Equal(got, []string{"abi_version", "uverbs0"}) {
			t.Errorf("%s: %q", VerbsClassDir, got)
		}
		// The network of /sys is that of this thread, and links lead through it.
		if got := names("/sys/class/net"); !slices.Equal(got, []string{"lo"}) {
			t.Errorf("/sys/class/net: %q", got)
		}
		if got, err := filepath.EvalSymlinks(filepath.Join(sample.Dir(), "device/net/lo")); got != "/sys/devices/virtual/net/lo" {
			t.Errorf("device/net/lo leads to %s, %v", got, err)
		}
		if got := names("/sys/fs/cgroup"); !slices.Equal(got, cgroup) {
			t.Errorf("/sys/fs/cgroup: %q, was %q", got, cgroup)
		}
		for _, d := range dirs {
			got := names(d)
			for _, n := range before[d] {
				if !slices.Contains(got, n) {
					t.Errorf("%s has no %s any more", d, n)
				}
			}
			for _, n := range got {
				if !slices.Contains(before[d], n) && !strings.HasPrefix(n, "infiniband") {
					t.Errorf("%s has %s", d, n)
				}
			}
		}
		for _, path := range []string{"/dev/infiniband/uverbs0", "/dev/null"} {
			var st unix.Stat_t
			if err := unix.Stat(path, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR || unix.Access(path, unix.R_OK|unix.W_OK) != nil {
				t.Errorf("%s: mode %o, %v", path, st.Mode, err)
			}
			if err := os.WriteFile(path, []byte("x"), 0); err != nil {
				t.Error(err)
			}
		}
		if got := read(t, VerbsClassDir+"/uverbs0/dev"); got != "1:3\n" {
			t.Errorf("dev: %q", got)
		}
		return nil
	})
	for _, d := range dirs {
		if got := names(d); !slices.Equal(got, before[d]) {
			t.Errorf("outside, %s is %q, was %q", d, got, before[d])
		}
	}
}

func TestUnescape(t *testing.T) {
	if got := unescape(`/sys/a\040b\134c`); got != `/sys/a b\c` {
		t.Errorf("%q", got)
	}
}
