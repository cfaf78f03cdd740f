// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"crypto/sha256"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestRsockets runs the checks of testdata/rsockets.c, on one device.
func TestRsockets(t *testing.T) {
	for _, c := range []string{"errors", "refused", "stream", "full", "poll", "iomap", "many", "timeouts", "threads", "signals", "small", "v6", "route", "dgram"} {
		t.Run(c, func(t *testing.T) { inFabric(t, nil, 0, 1, bin("rsockets"), c) })
	}
}

// TestRsocketsTwo: the checks between two processes.
func TestRsocketsTwo(t *testing.T) {
	for _, c := range []string{"peers", "dgram-peer", "killed"} {
		t.Run(c, func(t *testing.T) { inFabric(t, nil, 0, 2, bin("rsockets"), c) })
	}
}

// TestRsocketDefaults: what /etc/rdma/rsocket says is so.
func TestRsocketDefaults(t *testing.T) {
	script := "mount -t tmpfs none /etc && mkdir -p /etc/rdma/rsocket && cd /etc/rdma/rsocket"
	for file, v := range map[string]string{
		"mem_default": "30000", "wmem_default": "20000", "sqsize_default": "50", "rqsize_default": "60",
		"inline_default": "8", "iomap_size": "5", "polling_time": "0", "wake_up_interval": "nonsense",
	} {
		script += " && echo " + v + " > " + file
	}
	inFabric(t, nil, 0, 1, "unshare", "--mount", "sh", "-c", script+" && exec "+bin("rsockets")+" defaults")
}

// rsocketRuns are runs of rdma-core's programs for rsockets, in README.md's table.
var rsocketRuns = []string{
	"rstream -S 5000 -C 20 -I 20",
	"rstream -S 5000 -C 20 -I 20 -T b",
	"rstream -S 5000 -C 20 -I 20 -T a -T v",
	"rstream -S 100000 -C 10 -I 5 -T b -T v",
	"rstream -S 1 -C 2000 -I 1 -T n -T v",
	"rstream -S 3000000 -C 2 -I 2 -T v -i 0 -B 4000",
	"rstream -S 1000 -C 20 -I 20 -T r -T v",
	"rstream -S 1000 -C 20 -I 20 -T v -k 1 -f ip",
	"riostream -S 50000 -C 5 -I 20 -T v",
	"riostream -S 50000 -C 5 -I 20 -T b -T v",
	"riostream -S 1000000 -C 2 -I 5 -T a -T v",
	"udpong -S 1000 -C 300",
	"udpong -S 1500 -C 300 -T b -T e",
	"udpong -S 64 -C 1000 -T a -T e",
}

// A line of numbers: the program is done.
var rsocketRow = regexp.MustCompile(`(?m)^custom .*s +\d+\.\d+ +\d+\.\d+$`)

func TestRsocketPrograms(t *testing.T) {
	for _, r := range rsocketRuns {
		t.Run(r, func(t *testing.T) {
			server, env, want := r+" -b $TAPVERBS_ADDR", []string(nil), 2
			if strings.HasPrefix(r, "udpong") { // its server serves for ever
				env, want = []string{foreverEnv + "=1"}, 1
			}
			out := runCM(t, env, server, r+" -s $TAPVERBS_PEER")
			if n := len(rsocketRow.FindAllString(out, -1)); n != want || strings.Contains(out, "data verification failed") {
				t.Errorf("%d of %d have a result:\n%s", n, want, out)
			}
		})
	}
	t.Run("IPv6", func(t *testing.T) {
		out := runCM(t, nil, "rstream -S 20000 -C 10 -I 5 -T b -T v -b $TAPVERBS_ADDR6", "rstream -S 20000 -C 10 -I 5 -T b -T v -s $TAPVERBS_PEER6")
		if n := len(rsocketRow.FindAllString(out, -1)); n != 2 {
			t.Errorf("%d of 2 have a result:\n%s", n, out)
		}
	})
}

// TestRcopy: a file is copied, and is the same.
func TestRcopy(t *testing.T) {
	dir := t.TempDir()
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	data := make([]byte, 3_000_001)
	var seed [32]byte
	if _, err := rand.NewChaCha8(seed).Read(data); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(from, data, 0o600); err != nil {
		t.Fatal(err)
	}
	out := runCM(t, []string{foreverEnv + "=1"}, "rcopy", "rcopy "+from+" $TAPVERBS_PEER:"+to)
	got, err := os.ReadFile(to)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("%v: %d bytes with sum %x; %d were sent, with sum %x:\n%s", err, len(got), sha256.Sum256(got), len(data), sha256.Sum256(data), out)
	}
}

// TestPreload: programs for TCP by way of librspreload: rstream with sockets of TCP.
func TestPreload(t *testing.T) {
	lib, err := filepath.Glob("/usr/lib/*/rsocket/librspreload.so")
	if err != nil || len(lib) != 1 {
		t.Fatalf("librspreload.so (of Debian's librdmacm1): %v, %v", lib, err)
	}
	if has := exports(t, lib[0]); !has["T accept"] || has["T accept4"] { // README.md says so
		t.Errorf("%s has accept: %v, accept4: %v", lib[0], has["T accept"], has["T accept4"])
	}
	run := "rstream -T s -T v -S 10000 -C 10 -I 10"
	out := runCM(t, []string{preloadEnv + "=" + lib[0]}, run+" -b $TAPVERBS_ADDR", run+" -s $TAPVERBS_PEER")
	if n := len(rsocketRow.FindAllString(out, -1)); n != 2 {
		t.Errorf("%d of 2 have a result:\n%s", n, out)
	}
}
