// SPDX-License-Identifier: Apache-2.0

package sysfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Prepare readies the mount namespace of this process, which must be one of its own,
// for Show: mounts stay in it, and the directories that Show needs are there. The
// kernel lets nobody make a directory in /sys/class, so a tmpfs is laid over it (and
// over /dev), in which everything that was there is there again.
//
// With fresh set, /sys becomes that of the network namespace of the calling thread: a
// sysfs shows the namespace that it was mounted in. Where that is not permitted (inside
// of some containers), /sys stays as it was.
//
// It needs CAP_SYS_ADMIN in the namespace's user namespace.
func Prepare(fresh bool) error {
	// What is mounted outside goes on to be seen here, and not the other way round.
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("keep mounts in this namespace: %w", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs("/sys", &st); err != nil || st.Type != unix.SYSFS_MAGIC {
		return errors.New("/sys is no sysfs")
	}
	if fresh {
		// EBUSY: it is that of this network namespace.
		if err := remountSysfs(uintptr(st.Flags)); err != nil && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EBUSY) {
			return err
		}
	}
	if err := ensure(filepath.Dir(ClassDir), filepath.Base(ClassDir), filepath.Base(VerbsClassDir)); err != nil {
		return err
	}
	return ensure(filepath.Dir(nodeDir), filepath.Base(nodeDir))
}

// Show lets the mount namespace of this process, which must be one of its own that was
// prepared, have d and no other device.
func Show(d *Device) error {
	for _, dir := range []string{ClassDir, VerbsClassDir, nodeDir} {
		if err := mountTmpfs(dir); err != nil {
			return err
		}
	}
	// UCX wants a character device that may be read and written. Nobody talks to it:
	// what libibverbs would ask of it, it asks of the engine.
	const null = "/dev/null"
	var st unix.Stat_t
	if err := unix.Stat(null, &st); err != nil {
		return fmt.Errorf("%s: %w", null, err)
	}
	node := filepath.Join(nodeDir, d.Verbs)
	if err := put(node, ""); err != nil {
		return err
	}
	if err := unix.Mount(null, node, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s to %s: %w", null, node, err)
	}
	return d.build(ClassDir, VerbsClassDir, fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)))
}

// Namespace is the identity of this thread's mount namespace.
func Namespace() (string, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/mnt", &st); err != nil {
		return "", fmt.Errorf("look at the mount namespace: %w", err)
	}
	return strconv.FormatUint(st.Dev, 10) + ":" + strconv.FormatUint(st.Ino, 10), nil
}

// Inside says whether this thread is in another mount namespace than the one that
// Namespace named. What Namespace cannot have given names none.
func Inside(outer string) bool {
	inner, err := Namespace()
	dev, ino, ok := strings.Cut(outer, ":")
	_, bad := strconv.ParseUint(ino, 10, 64)
	return err == nil && ok && bad == nil && strings.HasPrefix(inner, dev+":") && inner != outer
}

func mountTmpfs(dir string) error {
	if err := unix.Mount("tapverbs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=755,size=4m"); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", dir, err)
	}
	return nil
}

// remountSysfs mounts a new sysfs over /sys and moves what is mounted below (cgroups,
// debugfs and the like) to it.
func remountSysfs(flags uintptr) error {
	const dir = "/sys"
	below, err := mountsBelow(dir)
	if err != nil {
		return err
	}
	trees := make([]int, len(below))
	defer func() {
		for _, fd := range trees {
			unix.Close(fd)
		}
	}()
	for i, m := range below {
		if trees[i], err = cloneTree(unix.AT_FDCWD, m); err != nil {
			trees[i] = -1 // not to be had; it would be hidden from us at worst
		}
	}
	// A user namespace may not make writable what was read-only (mount_namespaces(7)).
	keep := flags & (unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC)
	if err := unix.Mount("sysfs", dir, "sysfs", keep, ""); err != nil {
		return fmt.Errorf("mount sysfs: %w", err)
	}
	for i, m := range below {
		if trees[i] >= 0 {
			_ = moveTree(trees[i], m) // the new sysfs may not have that directory
		}
	}
	return nil
}

// mountsBelow lists the mount points below dir, those below others left out.
func mountsBelow(dir string) ([]string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var all []string
	for line := range strings.Lines(string(b)) {
		// proc_pid_mountinfo(5): the fifth field, with octal escapes.
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			all = append(all, unescape(f[4]))
		}
	}
	slices.Sort(all)
	var top []string
	for _, m := range all {
		if n := len(top); n == 0 || m != top[n-1] && !strings.HasPrefix(m, top[n-1]+"/") {
			top = append(top, m)
		}
	}
	return top, nil
}

func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// ensure makes sure that directories of these names are in dir: if one is not, and
// cannot be made without anybody outside seeing it, it lays a tmpfs over dir that holds
// what dir holds, and them.
func ensure(dir string, names ...string) error {
	missing := slices.ContainsFunc(names, func(n string) bool {
		st, err := os.Stat(filepath.Join(dir, n))
		return err != nil || !st.IsDir()
	})
	if !missing {
		return nil
	}
	old, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer old.Close()
	entries, err := old.ReadDir(-1)
	if err != nil {
		return fmt.Errorf("read %s: %w", dir, err)
	}
	if err := mountTmpfs(dir); err != nil {
		return err
	}
	for _, e := range entries {
		if err = carry(old, e, dir); err != nil {
			break
		}
	}
	for _, n := range names {
		if err == nil {
			err = os.MkdirAll(filepath.Join(dir, n), 0o755)
		}
	}
	if err != nil {
		return errors.Join(err, unix.Unmount(dir, unix.MNT_DETACH))
	}
	return nil
}

// carry lets an entry of the directory old appear in dir, which hides it.
func carry(old *os.File, e os.DirEntry, dir string) error {
	name, fd := e.Name(), int(old.Fd())
	to := filepath.Join(dir, name)
	if e.Type()&os.ModeSymlink != 0 {
		target := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(fd, name, target)
		if err == nil {
			err = os.Symlink(string(target[:n]), to)
		}
		if err != nil {
			return fmt.Errorf("carry the link %s over: %w", to, err)
		}
		return nil
	}
	tree, err := cloneTree(fd, name)
	if errors.Is(err, unix.ENOENT) {
		return nil // gone since
	}
	if err == nil {
		defer unix.Close(tree)
		if e.IsDir() {
			err = os.Mkdir(to, 0o755)
		} else {
			err = put(to, "")
		}
	}
	if err == nil {
		err = moveTree(tree, to)
	}
	if err != nil {
		return fmt.Errorf("carry %s over: %w", to, err)
	}
	return nil
}

// cloneTree gives a descriptor of a copy of what is at a path, with what is mounted below.
func cloneTree(dir int, path string) (int, error) {
	return unix.OpenTree(dir, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE|unix.AT_SYMLINK_NOFOLLOW)
}

// moveTree mounts what cloneTree gave.
func moveTree(tree int, to string) error {
	return unix.MoveMount(tree, "", unix.AT_FDCWD, to, unix.MOVE_MOUNT_F_EMPTY_PATH)
}
