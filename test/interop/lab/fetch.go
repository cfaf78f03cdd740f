// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// What the guest is made of comes from Debian's archive, by name, through apt with a
// configuration and a state of its own: nothing is installed on the host, whose packages may
// be others.

// userland are the packages whose programs the guest has; what they depend on comes with them.
var userland = []string{"ibverbs-utils", "ibverbs-providers", "rdmacm-utils", "perftest", "iproute2", "dash", "busybox-static", "libgcc-s1"}

// suites are where kernels come from, by the versions that Config knows.
var suites = map[string]string{"6.1": "bookworm", "6.12": "bookworm-backports"}

// cache is a directory for what was fetched and made.
type cache struct {
	dir string
	say func(format string, args ...any)
}

// openCache opens and locks it: one process at a time fetches and makes. The returned
// function unlocks.
func openCache(say func(string, ...any)) (cache, func(), error) {
	dir := os.Getenv("TAPVERBS_LAB_CACHE")
	if dir == "" {
		d, err := os.UserCacheDir()
		if err != nil {
			return cache{}, nil, fmt.Errorf("a place for the lab's files: %w; or set TAPVERBS_LAB_CACHE", err)
		}
		dir = filepath.Join(d, "tapverbs", "lab")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return cache{}, nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return cache{}, nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		_ = f.Close()
		return cache{}, nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return cache{dir, say}, func() { _ = f.Close() }, nil
}

func (c cache) path(elem ...string) string { return filepath.Join(append([]string{c.dir}, elem...)...) }

// made makes a directory unless one that holds what stamp says is there. A directory that
// was made halfway has no stamp.
func (c cache) made(name, stamp string, fill func(dir string) error) (string, error) {
	dir := c.path(name)
	if b, err := os.ReadFile(filepath.Join(dir, "stamp")); err == nil && string(b) == stamp {
		return dir, nil
	}
	if err := os.RemoveAll(dir); err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if err := fill(dir); err != nil {
		return "", err
	}
	return dir, os.WriteFile(filepath.Join(dir, "stamp"), []byte(stamp), 0o644)
}

// output runs a program in a directory and gives what it prints.
func output(ctx context.Context, dir string, env []string, name string, args ...string) (string, error) {
	c := exec.CommandContext(ctx, name, args...)
	c.Dir = dir
	c.Env = append(os.Environ(), env...)
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	if err := c.Run(); err != nil {
		said := strings.TrimSpace(errs.String())
		if len(said) > 1000 {
			said = "…" + said[len(said)-1000:]
		}
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, said)
	}
	return out.String(), nil
}

// mirror is where the host gets bookworm from, if it does.
func mirror(ctx context.Context) string {
	out, err := output(ctx, "", nil, "apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", "Codename: bookworm", "Component: main")
	if site := strings.Fields(out); err == nil && len(site) > 0 {
		return site[0]
	}
	return "http://deb.debian.org/debian"
}

// apt is an apt that knows one suite, and no package that is installed.
type apt struct {
	dir  string
	conf []string // for its environment
}

func (c cache) apt(ctx context.Context, suite string) (apt, error) {
	if _, err := exec.LookPath("apt-get"); err != nil {
		return apt{}, errors.New("the lab's guest is made of Debian's packages, which apt-get fetches, and there is none here")
	}
	a := apt{dir: c.path("apt", suite)}
	for _, d := range []string{"lists/partial", "archives/partial"} {
		if err := os.MkdirAll(filepath.Join(a.dir, d), 0o755); err != nil {
			return a, err
		}
	}
	conf := fmt.Sprintf(`Dir::Etc::sourcelist "%[1]s/sources.list";
Dir::Etc::sourceparts "-";
Dir::State "%[1]s";
Dir::State::lists "%[1]s/lists";
Dir::State::status "%[1]s/status";
Dir::Cache "%[1]s";
Dir::Cache::archives "%[1]s/archives";
APT::Architecture "amd64";
APT::Architectures { "amd64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::Retries "3";
APT::Update::Error-Mode "any";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
`, a.dir)
	from := fmt.Sprintf("deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n", mirror(ctx), suite)
	for name, text := range map[string]string{"apt.conf": conf, "sources.list": from, "status": ""} {
		if err := os.WriteFile(filepath.Join(a.dir, name), []byte(text), 0o644); err != nil {
			return a, err
		}
	}
	a.conf = []string{"APT_CONFIG=" + filepath.Join(a.dir, "apt.conf")}
	c.say("asking Debian's archive for %s", suite)
	_, err := output(ctx, a.dir, a.conf, "apt-get", "update", "-q")
	return a, err
}

// unpack unpacks packages, as they are and not installed.
func unpack(ctx context.Context, debs []string, dir string) error {
	for _, deb := range debs {
		if _, err := output(ctx, "", nil, "dpkg-deb", "-x", deb, dir); err != nil {
			return err
		}
	}
	return nil
}

// root is a directory with the userland.
func (c cache) root(ctx context.Context) (string, error) {
	return c.made("root", strings.Join(userland, " "), func(dir string) error {
		a, err := c.apt(ctx, "bookworm")
		if err != nil {
			return err
		}
		c.say("fetching %s, and what they need", strings.Join(userland, ", "))
		args := append([]string{"install", "-q", "-y", "--download-only"}, userland...)
		if _, err := output(ctx, a.dir, a.conf, "apt-get", args...); err != nil {
			return err
		}
		debs, err := filepath.Glob(filepath.Join(a.dir, "archives", "*.deb"))
		if err == nil {
			err = unpack(ctx, debs, dir)
		}
		return errors.Join(err, os.RemoveAll(filepath.Join(a.dir, "archives")))
	})
}

// kernel is a directory with a kernel's package.
func (c cache) kernel(ctx context.Context, version string) (string, error) {
	suite, ok := suites[version]
	if !ok {
		return "", fmt.Errorf("no kernel %s: there are 6.1 and 6.12", version)
	}
	name := "linux-" + version
	if was, err := os.ReadFile(c.path(name, "modules.of")); err != nil || string(was) != wanted() {
		_ = os.Remove(c.path(name, "stamp")) // fetched for fewer modules, if at all
	}
	return c.made(name, suite, func(dir string) error {
		a, err := c.apt(ctx, suite)
		if err != nil {
			return err
		}
		// linux-image-amd64 depends on the kernel that is current.
		out, err := output(ctx, a.dir, a.conf, "apt-cache", "show", "linux-image-amd64")
		if err != nil {
			return err
		}
		name := ""
		for line := range strings.Lines(out) {
			if on, ok := strings.CutPrefix(line, "Depends: linux-image-"+version+"."); ok && name == "" {
				name = "linux-image-" + version + "." + strings.FieldsFunc(on, func(r rune) bool { return strings.ContainsRune(" ,\n", r) })[0]
			}
		}
		if name == "" {
			return fmt.Errorf("%s has no kernel %s", suite, version)
		}
		c.say("fetching %s", name)
		if _, err := output(ctx, dir, a.conf, "apt-get", "download", "-q", name); err != nil {
			return err
		}
		debs, err := filepath.Glob(filepath.Join(dir, "*.deb"))
		if err != nil {
			return err
		}
		if err := unpack(ctx, debs, dir); err != nil {
			return err
		}
		for _, deb := range debs {
			if err := os.Remove(deb); err != nil {
				return err
			}
		}
		return thin(ctx, dir)
	})
}
