// SPDX-License-Identifier: Apache-2.0

// Package sysfs shows programs a verbs device where the kernel would: in
// /sys/class/infiniband, /sys/class/infiniband_verbs and /dev/infiniband, in a mount
// namespace of their own. UCX, Open MPI, perftest and rdma-core's own tests read these
// files rather than ask the library.
//
// Names and formats are those of Documentation/ABI/stable/sysfs-class-infiniband in the
// kernel. The files are plain ones; those that change are kept up to date by the
// engine (provider.Config.Sysfs).
package sysfs

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Where the kernel shows devices.
const (
	ClassDir      = "/sys/class/infiniband"
	VerbsClassDir = "/sys/class/infiniband_verbs"
	nodeDir       = "/dev/infiniband"
)

// Device is what is shown. It has one port.
type Device struct {
	Name  string // of the verbs device: "tapverbs0"
	Verbs string // of its character device: "uverbs0"
	GUID  uint64 // of node and system image, in host order
	// Firmware is what ibv_query_device(3) gives as fw_ver.
	Firmware string
	// NetDev is the port's network device.
	NetDev string
	// GIDs is the port's GID table, all of it RoCE v2.
	GIDs []netip.Addr
	// Live are the files that the engine keeps up to date, by their paths below the
	// device's directory, with what they hold at first.
	Live map[string]string
}

// Dir is the device's directory.
func (d *Device) Dir() string { return filepath.Join(ClassDir, d.Name) }

// Fixed properties of the port, those that libibverbs.so.1 answers with: what sets
// flags of struct ibv_port_attr also changes these.
const (
	capMask = 1 << 26              // IBV_PORT_IP_BASED_GIDS
	rate    = "40 Gb/sec (4X QDR)" // active_width 2, active_speed 4
	abi     = 6                    // of the kernel's uverbs (IB_USER_VERBS_ABI_VERSION)
)

// files gives the contents of the device's directory, by path.
func (d *Device) files() map[string]string {
	m := maps.Clone(d.Live)
	if m == nil {
		m = map[string]string{}
	}
	for path, content := range map[string]string{
		"node_type":              "1: CA",
		"node_guid":              guid(d.GUID),
		"sys_image_guid":         guid(d.GUID),
		"node_desc":              "tapverbs",
		"fw_ver":                 d.Firmware,
		"ports/1/cap_mask":       fmt.Sprintf("0x%08x", capMask),
		"ports/1/lid":            "0x0",
		"ports/1/lid_mask_count": "0",
		"ports/1/link_layer":     "Ethernet",
		"ports/1/rate":           rate,
		"ports/1/sm_lid":         "0x0",
		"ports/1/sm_sl":          "0",
		"ports/1/pkeys/0":        "0xffff",
		// What the counters may be late by, in ms; the kernel's own default is 10.
		"ports/1/hw_counters/lifespan": "100",
		"device/numa_node":             "-1", // of no node, as virtual devices are
	} {
		m[path] = content + "\n"
	}
	for i, a := range d.GIDs {
		n := strconv.Itoa(i)
		m["ports/1/gids/"+n] = gid(a) + "\n"
		m["ports/1/gid_attrs/types/"+n] = "RoCE v2\n"
		m["ports/1/gid_attrs/ndevs/"+n] = d.NetDev + "\n"
	}
	// All processors are near a device that is one of their processes.
	if b, err := os.ReadFile("/sys/devices/system/cpu/online"); err == nil {
		m["device/local_cpulist"] = string(b)
		if mask, err := cpuMask(strings.TrimSpace(string(b))); err == nil {
			m["device/local_cpus"] = mask + "\n"
		}
	}
	return m
}

// build writes the trees of the two classes into two directories. dev is the number
// of the character device.
func (d *Device) build(class, verbs, dev string) error {
	root := filepath.Join(class, d.Name)
	for path, content := range d.files() {
		if err := put(filepath.Join(root, path), content); err != nil {
			return err
		}
	}
	uverbs := filepath.Join(verbs, d.Verbs)
	for path, content := range map[string]string{
		filepath.Join(verbs, "abi_version"):  strconv.Itoa(abi),
		filepath.Join(uverbs, "ibdev"):       d.Name,
		filepath.Join(uverbs, "abi_version"): "1",
		filepath.Join(uverbs, "dev"):         dev,
	} {
		if err := put(path, content+"\n"); err != nil {
			return err
		}
	}
	for path, to := range map[string]string{
		filepath.Join(root, "device/net", d.NetDev):             "../../../../net/" + d.NetDev,
		filepath.Join(root, "device/infiniband", d.Name):        "../..",
		filepath.Join(root, "device/infiniband_verbs", d.Verbs): "../../../../infiniband_verbs/" + d.Verbs,
		filepath.Join(uverbs, "device"):                         "../../infiniband/" + d.Name + "/device",
	} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.Symlink(to, path); err != nil {
			return err
		}
	}
	return nil
}

// put makes a file that looks as those of the kernel do: nobody may write to it, but
// for the owner of the namespace, as whom the engine does.
func put(path, content string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(content), 0o444)
}

func guid(g uint64) string {
	return fmt.Sprintf("%04x:%04x:%04x:%04x", g>>48, g>>32&0xffff, g>>16&0xffff, g&0xffff)
}

// gid writes an address in full, an IPv4 one as that mapped into IPv6.
func gid(a netip.Addr) string {
	b := a.As16()
	var groups []string
	for i := 0; i < 16; i += 2 {
		groups = append(groups, fmt.Sprintf("%02x%02x", b[i], b[i+1]))
	}
	return strings.Join(groups, ":")
}

// cpuMask turns a list of processors, such as "0-3,8", into the kernel's other way to
// write it: words of 32 bits in hexadecimal, the highest first.
func cpuMask(list string) (string, error) {
	var words []uint32
	for r := range strings.SplitSeq(list, ",") {
		lo, hi, ok := strings.Cut(r, "-")
		if !ok {
			hi = lo
		}
		a, err := strconv.ParseUint(lo, 10, 16)
		if err != nil {
			return "", err
		}
		b, err := strconv.ParseUint(hi, 10, 16)
		if err != nil {
			return "", err
		}
		for ; a <= b; a++ {
			for uint64(len(words)) <= a/32 {
				words = append(words, 0)
			}
			words[a/32] |= 1 << (a % 32)
		}
	}
	var out []string
	for _, w := range slices.Backward(words) {
		out = append(out, fmt.Sprintf("%08x", w))
	}
	return strings.Join(out, ","), nil
}
