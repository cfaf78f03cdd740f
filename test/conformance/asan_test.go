// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestSanitizer runs sessions on a libibverbs.so.1 and a librdmacm.so.1 that were built with the
// address sanitizer: it ends a program at the first invalid access of the libraries', and with a
// status of its own when their memory was not freed.
func TestSanitizer(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "lib")
	out, err := exec.Command("make", "-s", "-C", "../..", dir+"/libibverbs.so.1", dir+"/librdmacm.so.1", "LIBDIR="+dir,
		"CFLAGS=-fsanitize=address -fno-omit-frame-pointer").CombinedOutput()
	if err == nil {
		err = os.Symlink(filepath.Join(libs(), "libtapverbs-engine.so"), filepath.Join(dir, "libtapverbs-engine.so"))
	}
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	asan, err := exec.Command("gcc", "-print-file-name=libasan.so").Output()
	if err != nil {
		t.Fatal(err)
	}
	env := []string{asEnv + "=" + asPair,
		// The engine's runtime and the programs' own leaks are not the library's affair,
		// nor is a fault on a page of the program's that vanished: the engine handles it.
		asanEnv + "=" + strings.TrimSpace(string(asan)), "ASAN_OPTIONS=handle_segv=0:handle_sigbus=0:exitcode=77"}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []string{
		"ibv_rc_pingpong -g 1 -c", "ibv_rc_pingpong -g 1 -t -c", "ibv_rc_pingpong -g 1 -N -c",
		"ibv_ud_pingpong -g 1 -e -c", "ibv_srq_pingpong -g 1 -c", "ibv_xsrq_pingpong -g 1",
	} {
		t.Run(r, func(t *testing.T) {
			inFabricWith(t, dir, env, 0, 2, append([]string{exe, "--"}, strings.Fields(r)...)...)
		})
	}
	for prog, checks := range map[string][]string{"memory": memoryChecks, "rdmacm": cmChecks} {
		for _, c := range checks {
			t.Run(prog+" "+c, func(t *testing.T) {
				inFabricWith(t, dir, env[1:], 0, 1, "env", "LD_PRELOAD="+strings.TrimSpace(string(asan)), bin(prog), c)
			})
		}
	}
}
