// SPDX-License-Identifier: Apache-2.0

package fabric

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The test program plays these roles when TEST_ROLE says so.
func TestMain(m *testing.M) {
	switch os.Getenv("TEST_ROLE") {
	case "":
		os.Exit(m.Run())
	case "inside": // runs in the private namespace
		os.Exit(report(inside()))
	case "user": // an ordinary user who wants a private fabric
		self := exec.Command("/proc/self/exe")
		self.Env = append(os.Environ(), "TEST_ROLE=inside")
		self.Stdout, self.Stderr = os.Stdout, os.Stderr
		wait, err := Start(self)
		if err == nil {
			err = wait()
		}
		os.Exit(report(err))
	case "parent": // starts a child that outlives nothing, and is killed
		self := exec.Command("/proc/self/exe")
		self.Env = append(os.Environ(), "TEST_ROLE=child")
		self.Stdout, self.Stderr = os.Stdout, os.Stderr
		if _, err := Start(self); err != nil {
			os.Exit(report(err))
		}
		select {}
	case "child":
		fmt.Println("child is", os.Getpid())
		select {}
	}
}

func report(err error) int {
	if err == nil {
		return 0
	}
	fmt.Println("error:", err)
	for name, s := range map[string]error{"ErrUserNS": ErrUserNS, "ErrPermission": ErrPermission, "ErrNoTUN": ErrNoTUN} {
		if errors.Is(err, s) {
			fmt.Println("is", name)
		}
	}
	return 1
}

func inside() error {
	if !InPrivate() {
		return errors.New("InPrivate is false")
	}
	f, err := New(Config{})
	if err != nil {
		return err
	}
	p, err := f.AddPort(0)
	if err != nil {
		return err
	}
	if _, _, err := f.HostAddr(); err != nil {
		return err
	}
	ino, err := netnsInode()
	if err != nil {
		return err
	}
	fmt.Println("made", p.Name, "in", ino, "uid", os.Geteuid())
	return f.Close()
}

func TestPrivateAsRoot(t *testing.T) {
	needRoot(t)
	if InPrivate() {
		t.Fatal("the test is in a private namespace")
	}
	outer, err := netnsInode()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "TEST_ROLE=inside")
	cmd.Stdout, cmd.Stderr = &out, &out
	wait, err := Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	if err := wait(); err != nil {
		t.Fatal(err, out.String())
	}
	if !strings.Contains(out.String(), "made tv0p0 in ") || strings.Contains(out.String(), outer) {
		t.Errorf("%s", out.String())
	}
	// The variable alone proves nothing.
	t.Setenv(privateEnv, outer)
	if InPrivate() {
		t.Error("InPrivate in the namespace the private one was made from")
	}
}

// asNobody runs the test program as an ordinary user, with /dev/net/tun of the given
// mode, and returns what it printed.
func asNobody(t *testing.T, role string, mode uint32) (string, error) {
	t.Helper()
	needRoot(t)
	dir, err := os.MkdirTemp("", "fabric")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	// A program that everybody may run.
	bin := filepath.Join(dir, "fabric.test")
	if err := copyFile("/proc/self/exe", bin); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	var runErr error
	// A thread with mounts of its own, for a /dev/net/tun of its own.
	if err := WithNS(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		node := filepath.Join(dir, "tun")
		if err := unix.Mknod(node, unix.S_IFCHR|mode, int(unix.Mkdev(10, 200))); err != nil {
			return err
		}
		if err := os.Chmod(node, os.FileMode(mode)); err != nil {
			return err
		}
		if err := unix.Mount(node, tunPath, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		cmd := exec.Command(bin)
		cmd.Dir = "/"
		cmd.Env = append(os.Environ(), "TEST_ROLE="+role)
		cmd.Stdout, cmd.Stderr = &out, &out
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		runErr = cmd.Run()
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return out.String(), runErr
}

func copyFile(from, to string) error {
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(w, r); err != nil {
		w.Close()
		return err
	}
	return w.Close()
}

func TestPrivateAsOrdinaryUser(t *testing.T) {
	if err := userNSForbidden(); err != nil {
		t.Skip(err)
	}
	out, err := asNobody(t, "user", 0o666)
	if err != nil || !strings.Contains(out, "made tv0p0 in ") || !strings.Contains(out, "uid 0") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestPrivateWithoutTUN(t *testing.T) {
	out, err := asNobody(t, "user", 0o600)
	if err == nil || !strings.Contains(out, "is ErrPermission") || !strings.Contains(out, "chmod 0666 /dev/net/tun") {
		t.Errorf("%v\n%s", err, out)
	}
	t.Log(out)
}

// With no user namespace left to have, as a limit of 0 or a policy would do it.
func TestUserNSForbidden(t *testing.T) {
	needRoot(t)
	cmd := exec.Command("/bin/true")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER}
	for _, errno := range []syscall.Errno{unix.EPERM, unix.EACCES, unix.ENOSPC, unix.EUSERS, unix.EINVAL} {
		if err := explainStart(cmd, errno); !errors.Is(err, ErrUserNS) || !strings.Contains(err.Error(), "run as root") {
			t.Errorf("%v", err)
		}
	}
	if err := explainStart(cmd, unix.ENOENT); errors.Is(err, ErrUserNS) {
		t.Errorf("%v", err)
	}
	// And for real: a user namespace in which no more can be made.
	if err := WithNS(func() error {
		out, err := inLimitedUserNS(t)
		if err == nil || !strings.Contains(out, "is ErrUserNS") {
			t.Errorf("%v\n%s", err, out)
		}
		t.Log(out)
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// inLimitedUserNS runs the "user" role in a user namespace with a limit of 0
// namespaces, and without capabilities but for those it needs to set that.
func inLimitedUserNS(t *testing.T) (string, error) {
	t.Helper()
	var out bytes.Buffer
	// The shell sets the limit of its own user namespace and drops to a user
	// that has no capabilities there.
	cmd := exec.Command("/bin/sh", "-c", "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --reuid 1 --regid 1 --clear-groups --inh-caps=-all \"$0\"", "/proc/self/exe")
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "fabric")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(dir, "fabric.test")
	if err := copyFile(self, bin); err != nil {
		t.Fatal(err)
	}
	node := filepath.Join(dir, "tun")
	if err := unix.Mknod(node, unix.S_IFCHR|0o666, int(unix.Mkdev(10, 200))); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(node, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(node, tunPath, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	cmd.Args[3] = bin
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "TEST_ROLE=user")
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 2}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 2}},
		// As root of the outside: a group map of more than one needs it.
		GidMappingsEnableSetgroups: true,
	}
	err = cmd.Run()
	return out.String(), err
}

// When the starter is killed, what it started dies too, and with it the namespace.
func TestPrivateDiesWithParent(t *testing.T) {
	needRoot(t)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "TEST_ROLE=parent")
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd.Stdout, cmd.Stderr = w, w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	// Not to wait for ever for what does not come.
	if err := r.SetReadDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	br := bufio.NewReader(r)
	line, err := br.ReadString('\n')
	var child int
	if _, serr := fmt.Sscanf(line, "child is %d\n", &child); err != nil || serr != nil {
		t.Fatalf("%q, %v", line, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	// The pipe ends when its last writer, the child, is dead.
	if rest, err := io.ReadAll(br); err != nil || len(rest) != 0 {
		unix.Kill(child, unix.SIGKILL)
		t.Errorf("the child lives on: %q, %v", rest, err)
	}
}
