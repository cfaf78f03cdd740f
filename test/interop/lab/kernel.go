// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"compress/gzip"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// bootModules are loaded when the guest starts. crc32_generic is what rxe computes its ICRC
// with: the quicker ones are slower when emulated.
var bootModules = []string{"virtio_pci", "virtio_net", "crc32_generic", "ib_uverbs", "rdma_ucm", "ib_umad", "rdma_rxe"}

// moreModules are there for programs to load, most of them by being used.
var moreModules = []string{"virtio_rng", "tun", "tap", "veth", "bridge", "dummy", "ifb", "vhost_net", "configfs",
	"sch_netem", "sch_prio", "sch_tbf", "sch_red", "sch_codel", "sch_fq_codel", "sch_ingress", "cls_u32", "cls_basic", "cls_flower", "cls_matchall", "act_gact", "act_mirred"}

// wanted is which modules of a kernel are kept, for the file modules.of beside them.
func wanted() string { return strings.Join(slices.Concat(bootModules, moreModules), " ") }

// unpackers are programs for what kernels and modules are compressed with, by its first bytes.
var unpackers = []struct {
	magic string
	name  string
}{{"\xfd7zXZ\x00", "xz"}, {"\x28\xb5\x2f\xfd", "zstd"}}

// decompress gives what b holds, whatever it is compressed with.
func decompress(ctx context.Context, b []byte) ([]byte, error) {
	if bytes.HasPrefix(b, []byte("\x1f\x8b")) {
		r, err := gzip.NewReader(bytes.NewReader(b))
		if err != nil {
			return nil, err
		}
		r.Multistream(false) // a kernel has more behind it
		return io.ReadAll(r)
	}
	for _, u := range unpackers {
		if !bytes.HasPrefix(b, []byte(u.magic)) {
			continue
		}
		c := exec.CommandContext(ctx, u.name, "-dc")
		c.Stdin = bytes.NewReader(b)
		out, err := c.Output()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", u.name, err)
		}
		return out, nil
	}
	return b, nil
}

// vmlinux takes the kernel out of the image that boot loaders want, whose decompressor would
// take longer than all the rest of booting when it is emulated. QEMU starts an ELF file with
// a PVH note. Where it is: Documentation/x86/boot.rst, payload_offset.
func vmlinux(ctx context.Context, image []byte) ([]byte, error) {
	if len(image) < 0x250 || string(image[0x202:0x206]) != "HdrS" {
		return nil, errors.New("not a kernel image")
	}
	setup := int(image[0x1f1])
	if setup == 0 {
		setup = 4
	}
	from := (setup+1)*512 + int(binary.LittleEndian.Uint32(image[0x248:]))
	to := from + int(binary.LittleEndian.Uint32(image[0x24c:]))
	if from > to || to > len(image) {
		return nil, errors.New("not a kernel image: its payload is not in it")
	}
	// The payload's last four bytes are its length, which is no part of what xz knows.
	out, err := decompress(ctx, image[from:to-4])
	if err == nil && !bytes.HasPrefix(out, []byte(elf.ELFMAG)) {
		err = errors.New("what is in the kernel image is no ELF file")
	}
	return out, err
}

// thin removes what of a kernel's package the guest can do without, most of 390 MB, and puts
// vmlinux beside the rest.
func thin(ctx context.Context, dir string) error {
	images, err := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*"))
	if err != nil || len(images) != 1 {
		return fmt.Errorf("a kernel package with %d kernels: %w", len(images), err)
	}
	b, err := os.ReadFile(images[0])
	if err != nil {
		return err
	}
	if b, err = vmlinux(ctx, b); err != nil {
		return fmt.Errorf("%s: %w", images[0], err)
	}
	if err := os.WriteFile(filepath.Join(dir, "vmlinux"), b, 0o644); err != nil {
		return err
	}
	mods, err := findModules(dir)
	if err != nil {
		return err
	}
	want, err := mods.closure(ctx, slices.Concat(bootModules, moreModules))
	if err != nil {
		return err
	}
	keep := filepath.Join(dir, "modules")
	if err := os.Mkdir(keep, 0o755); err != nil {
		return err
	}
	for _, m := range want {
		if err := os.WriteFile(filepath.Join(keep, m.name+".ko"), m.code, 0o644); err != nil {
			return err
		}
	}
	release := strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-")
	if err := os.WriteFile(filepath.Join(dir, "release"), []byte(release), 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "modules.of"), []byte(wanted()), 0o644); err != nil {
		return err
	}
	for _, d := range []string{"lib", "usr", "boot", "etc"} {
		if err := os.RemoveAll(filepath.Join(dir, d)); err != nil {
			return err
		}
	}
	return nil
}

// module is a kernel module.
type module struct {
	name    string // with _ for -, as depends= has it
	needs   []string
	aliases []string
	code    []byte
}

// signature ends a module that is signed: a note of 12 bytes, whose last four are the
// signature's length, goes before it. See kernel/module_signature.c.
const signature = "~Module signature appended~\n"

// unsigned takes the signature off: to check one takes seconds when emulated.
func unsigned(b []byte) []byte {
	body, ok := bytes.CutSuffix(b, []byte(signature))
	if !ok || len(body) < 12 {
		return b
	}
	n := int(binary.BigEndian.Uint32(body[len(body)-4:]))
	if len(body)-12-n < 0 {
		return b
	}
	return body[:len(body)-12-n]
}

// readModule reads a module and what its .modinfo says.
func readModule(ctx context.Context, path string) (*module, error) {
	b, err := os.ReadFile(path)
	if err == nil {
		b, err = decompress(ctx, b)
	}
	if err != nil {
		return nil, err
	}
	name, _, _ := strings.Cut(filepath.Base(path), ".ko")
	m := &module{name: strings.ReplaceAll(name, "-", "_"), code: unsigned(b)}
	f, err := elf.NewFile(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	info := f.Section(".modinfo")
	if info == nil {
		return nil, fmt.Errorf("%s: no module", path)
	}
	text, err := info.Data()
	if err != nil {
		return nil, err
	}
	for entry := range strings.SplitSeq(string(text), "\x00") {
		switch k, v, _ := strings.Cut(entry, "="); k {
		case "depends":
			m.needs = append(m.needs, strings.FieldsFunc(v, func(r rune) bool { return r == ',' })...)
		case "alias":
			m.aliases = append(m.aliases, v)
		}
	}
	return m, nil
}

// moduleFiles are modules' files by their names.
type moduleFiles map[string]string

// findModules finds the modules below a directory.
func findModules(dir string) (moduleFiles, error) {
	all := moduleFiles{}
	return all, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.Contains(d.Name(), ".ko") {
			name, _, _ := strings.Cut(d.Name(), ".ko")
			all[strings.ReplaceAll(name, "-", "_")] = path
		}
		return err
	})
}

// closure gives the modules of these names with all that they depend on, dependencies
// first. What is built in is not there, and not missed.
func (all moduleFiles) closure(ctx context.Context, names []string) (out []*module, err error) {
	out, err = all.only(ctx, names)
	if err == nil && all["rdma_rxe"] == "" {
		err = errors.New("this kernel has no rdma_rxe")
	}
	return out, err
}

func (all moduleFiles) only(ctx context.Context, names []string) (out []*module, err error) {
	done := map[string]bool{}
	var add func(name string) error
	add = func(name string) error {
		path := all[name]
		if path == "" || done[name] {
			return nil
		}
		done[name] = true
		m, err := readModule(ctx, path)
		if err != nil {
			return err
		}
		for _, n := range m.needs {
			if err := add(strings.ReplaceAll(n, "-", "_")); err != nil {
				return err
			}
		}
		out = append(out, m)
		return nil
	}
	for _, n := range names {
		if err := add(n); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// needs are the names of the modules that one depends on, those that others depend on last.
func (all moduleFiles) needs(ctx context.Context, m *module) (names []string, err error) {
	if len(m.needs) == 0 {
		return nil, nil
	}
	subs := make([]string, len(m.needs))
	for i, n := range m.needs {
		subs[i] = strings.ReplaceAll(n, "-", "_")
	}
	mods, err := all.only(ctx, subs)
	for _, d := range mods {
		names = append(names, d.name)
	}
	slices.Reverse(names)
	return names, err
}
