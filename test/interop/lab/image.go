// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// programs are what the guest has beside busybox. Those that a userland lacks are missed
// when they are called.
var programs = []string{
	"ibv_devices", "ibv_devinfo", "ibv_asyncwatch", "ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong", "ibv_srq_pingpong", "ibv_xsrq_pingpong",
	"rping", "ucmatose", "udaddy", "mckey", "cmtime", "rdma_server", "rdma_client", "rdma_xserver", "rdma_xclient",
	"rstream", "riostream", "rcopy", "udpong",
	"ib_send_bw", "ib_send_lat", "ib_write_bw", "ib_write_lat", "ib_read_bw", "ib_read_lat", "ib_atomic_bw", "ib_atomic_lat",
	"rdma", "ip", "tc", "bridge", "ss", "dash",
}

// libDirs are where a userland has its libraries.
var libDirs = []string{"lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib64", "usr/lib64"}

// image is what the guest's root holds, and at last an initramfs: an archive of cpio's
// format "newc". See Documentation/driver-api/early-userspace/buffer-format.rst.
type image struct {
	root  string // a userland
	files map[string]file
}

// file is one: what it holds, or what it leads to.
type file struct {
	mode fs.FileMode
	data []byte
	link string
}

// inRoot resolves a file of the userland, whose links mean the userland's own root.
func (m *image) inRoot(name string) (string, error) {
	for range 20 {
		path := filepath.Join(m.root, name)
		to, err := os.Readlink(path)
		if err != nil {
			_, err = os.Stat(path)
			return path, err
		}
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(name), to)
		}
		name = to
	}
	return "", fmt.Errorf("%s: too many links", name)
}

// library adds a library by its name, and what that needs.
func (m *image) library(name string) error {
	if _, ok := m.files["lib/x86_64-linux-gnu/"+name]; ok {
		return nil
	}
	for _, d := range libDirs {
		if path, err := m.inRoot(filepath.Join(d, name)); err == nil {
			return m.object("lib/x86_64-linux-gnu/"+name, path)
		}
	}
	return fmt.Errorf("the packages have no library %s", name)
}

// object adds a program or library with the libraries that it needs.
func (m *image) object(as, path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	m.files[as] = file{mode: 0o755, data: b}
	f, err := elf.NewFile(bytes.NewReader(b))
	if err != nil {
		return nil // a script
	}
	needs, err := f.ImportedLibraries()
	if err != nil {
		return err
	}
	for _, n := range needs {
		if err := m.library(n); err != nil {
			return fmt.Errorf("%s: %w", as, err)
		}
	}
	return nil
}

func (m *image) userland() error {
	for _, p := range programs {
		for _, d := range []string{"usr/bin", "bin", "usr/sbin", "sbin"} {
			if path, err := m.inRoot(filepath.Join(d, p)); err == nil {
				if err := m.object("usr/bin/"+p, path); err != nil {
					return err
				}
				break
			}
		}
	}
	// What is loaded by name, and not needed by the loader's account: the provider of rxe, and
	// what pthread_exit wants.
	drivers, err := filepath.Glob(filepath.Join(m.root, "usr/lib/x86_64-linux-gnu/libibverbs/librxe-*"))
	if err != nil || len(drivers) == 0 {
		return errors.Join(errors.New("the packages have no provider for rxe"), err)
	}
	for _, d := range drivers {
		if err := m.object(strings.TrimPrefix(d, m.root+"/"), d); err != nil {
			return err
		}
	}
	if err := m.library("libgcc_s.so.1"); err != nil {
		return err
	}
	loader, err := m.inRoot("lib64/ld-linux-x86-64.so.2")
	if err != nil {
		return err
	}
	if err := m.object("lib64/ld-linux-x86-64.so.2", loader); err != nil {
		return err
	}
	tables, err := filepath.Glob(filepath.Join(m.root, "usr/lib/tc/*.dist"))
	if err != nil {
		return err
	}
	for _, t := range tables {
		b, err := os.ReadFile(t)
		if err != nil {
			return err
		}
		m.files["usr/lib/tc/"+filepath.Base(t)] = file{mode: 0o644, data: b}
	}
	m.text("etc/libibverbs.d/rxe.driver", "driver rxe\n")
	m.text("etc/passwd", "root:x:0:0:root:/tmp:/bin/sh\n")
	m.text("etc/group", "root:x:0:\n")
	m.text("etc/hosts", "127.0.0.1 localhost\n"+GuestAddr+" guest\n")
	m.text("etc/nsswitch.conf", "hosts: files\n")
	return m.busybox()
}

func (m *image) text(name, s string) { m.files[name] = file{mode: 0o644, data: []byte(s)} }

// busybox adds all that there is no better program for. Its shell would not look for those.
func (m *image) busybox() error {
	path, err := m.inRoot("bin/busybox")
	if err != nil {
		return err
	}
	if err := m.object("bin/busybox", path); err != nil {
		return err
	}
	names, err := exec.Command(path, "--list").Output()
	if err != nil {
		return fmt.Errorf("%s --list: %w", path, err)
	}
	for n := range strings.FieldsSeq(string(names)) {
		if _, ok := m.files["usr/bin/"+n]; !ok && n != "busybox" {
			m.files["bin/"+n] = file{mode: fs.ModeSymlink | 0o777, link: "busybox"}
		}
	}
	m.files["bin/sh"] = file{mode: fs.ModeSymlink | 0o777, link: "../usr/bin/dash"}
	m.files["sbin/modprobe"] = file{mode: fs.ModeSymlink | 0o777, link: "../bin/busybox"} // the kernel calls it
	return nil
}

// kernel adds modules, and what modprobe wants to know of them.
func (m *image) kernel(ctx context.Context, dir string) error {
	release, err := os.ReadFile(filepath.Join(dir, "release"))
	if err != nil {
		return err
	}
	all, err := findModules(filepath.Join(dir, "modules"))
	if err != nil {
		return err
	}
	at := "lib/modules/" + string(release) + "/"
	boot, err := all.closure(ctx, bootModules)
	if err != nil {
		return err
	}
	list := ""
	for _, mod := range boot {
		list += "/" + at + mod.name + ".ko\n"
	}
	m.text("lib/modules/boot", list)
	mods, err := all.closure(ctx, slices.Concat(bootModules, moreModules))
	if err != nil {
		return err
	}
	var deps, aliases strings.Builder
	for _, mod := range mods {
		m.files[at+mod.name+".ko"] = file{mode: 0o644, data: mod.code}
		fmt.Fprintf(&deps, "%s.ko:", mod.name)
		// Nearest first; those that they need are in their own lines, and here again.
		sub, err := all.needs(ctx, mod)
		if err != nil {
			return err
		}
		for _, n := range sub {
			fmt.Fprintf(&deps, " %s.ko", n)
		}
		deps.WriteByte('\n')
		for _, a := range mod.aliases {
			fmt.Fprintf(&aliases, "alias %s %s\n", a, mod.name)
		}
	}
	m.text(at+"modules.dep", deps.String())
	m.text(at+"modules.alias", aliases.String())
	m.text(at+"modules.symbols", "")
	return nil
}

// write writes the archive.
func (m *image) write(name string) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer f.Close()
	w := archive{w: bufio.NewWriterSize(f, 1<<20)}
	dirs := map[string]bool{}
	for _, d := range []string{"dev", "proc", "sys", "tmp", "run", "root"} {
		dirs[d] = true
	}
	for name := range m.files {
		for d := filepath.Dir(name); d != "."; d = filepath.Dir(d) {
			dirs[d] = true
		}
	}
	for _, d := range sorted(dirs) {
		w.entry(d, 0o040755, nil, 0, 0)
	}
	w.entry("dev/console", 0o020600, nil, 5, 1) // /init's standard output
	for _, name := range sorted(m.files) {
		if e := m.files[name]; e.link != "" {
			w.entry(name, 0o120777, []byte(e.link), 0, 0)
		} else {
			w.entry(name, 0o100000|uint32(e.mode), e.data, 0, 0)
		}
	}
	w.entry("TRAILER!!!", 0, nil, 0, 0)
	if w.err == nil {
		w.err = w.w.Flush()
	}
	return w.err
}

func sorted[V any](m map[string]V) []string {
	names := make([]string, 0, len(m))
	for n := range m {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// archive is one that is being written; err is the first error.
type archive struct {
	w   *bufio.Writer
	n   int
	ino uint32
	err error
}

func (a *archive) bytes(b []byte) {
	if a.err == nil {
		_, a.err = a.w.Write(b)
		a.n += len(b)
	}
}

// entry adds an entry: its header in hexadecimal, its name and what it holds, each up to a
// multiple of four bytes.
func (a *archive) entry(name string, mode uint32, data []byte, major, minor uint32) {
	a.ino++
	head := "070701"
	for _, v := range []uint32{a.ino, mode, 0, 0, 1, 0, uint32(len(data)), 0, 0, major, minor, uint32(len(name) + 1), 0} {
		head += fmt.Sprintf("%08X", v)
	}
	a.bytes([]byte(head + name + "\x00"))
	a.pad()
	a.bytes(data)
	a.pad()
}

func (a *archive) pad() { a.bytes(make([]byte, -a.n&3)) }

// Image is what a guest starts from: files in the cache.
type Image struct{ Kernel, Initramfs string }

// Build makes the image with a kernel, "6.1" (bookworm's) or "6.12" (that of its backports),
// unless it is there. What it needs for that it fetches. say is told what is going on.
func Build(ctx context.Context, version string, say func(format string, args ...any)) (Image, error) {
	i, err := build(ctx, version, say)
	if err != nil {
		return i, fmt.Errorf("making the lab's guest: %w", err)
	}
	return i, nil
}

func build(ctx context.Context, version string, say func(string, ...any)) (i Image, err error) {
	c, unlock, err := openCache(say)
	if err != nil {
		return i, err
	}
	defer unlock()
	init := c.path("init")
	if _, err := output(ctx, "", []string{"CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64"}, "go", "build", "-ldflags", "-s -w", "-o", init,
		"github.com/tapverbs/tapverbs/test/interop/lab/guest"); err != nil {
		return i, fmt.Errorf("the guest's first program: %w", err)
	}
	b, err := os.ReadFile(init)
	if err != nil {
		return i, err
	}
	root, err := c.root(ctx)
	if err != nil {
		return i, err
	}
	dir, err := c.kernel(ctx, version)
	if err != nil {
		return i, err
	}
	i = Image{Kernel: filepath.Join(dir, "vmlinux"), Initramfs: filepath.Join(dir, "initramfs")}
	// What an image is made of: the modules are in the kernel's directory for good.
	stamp := fmt.Sprintf("%x %v %v %v\n", sha256.Sum256(b), userland, programs, bootModules)
	if was, err := os.ReadFile(i.Initramfs + ".of"); err == nil && string(was) == stamp {
		return i, nil
	}
	m := &image{root: root, files: map[string]file{"init": {mode: 0o755, data: b}}}
	if err := m.userland(); err != nil {
		return i, err
	}
	if err := m.kernel(ctx, dir); err != nil {
		return i, err
	}
	// A guest that is starting has the old one open.
	if err := m.write(i.Initramfs + ".new"); err != nil {
		return i, err
	}
	if err := os.Rename(i.Initramfs+".new", i.Initramfs); err != nil {
		return i, err
	}
	return i, os.WriteFile(i.Initramfs+".of", []byte(stamp), 0o644)
}
