// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/internal/fabric"
)

// asCounters runs ibv_rc_pingpong, with rank 0 as the server, and looks at the counters
// of its device; the argument is a directory that the ranks share.
const asCounters = "counters"

const counterIters = 1000

// portFile reads a file of the port of this rank's device.
func portFile(path string) string {
	b, err := os.ReadFile(filepath.Join("/sys/class/infiniband/tapverbs0/ports/1", path))
	if err != nil {
		fail(err)
	}
	return strings.TrimSuffix(string(b), "\n")
}

func counter(path string) uint64 {
	n, err := strconv.ParseUint(portFile(path), 10, 64)
	if err != nil {
		fail(err)
	}
	return n
}

// pingpong starts this rank's side of ibv_rc_pingpong.
func pingpong(iters int) (*exec.Cmd, error) {
	args := []string{"-g", "1", "-n", strconv.Itoa(iters)}
	if os.Getenv("TAPVERBS_RANK") == "1" {
		for !fabric.Listens(0, 18515) {
			time.Sleep(time.Millisecond)
		}
		args = append(args, "127.0.0.1")
	}
	c := exec.Command("ibv_rc_pingpong", args...)
	c.Stderr = os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return c, c.Start()
}

// counters fails unless counters move while a program runs, and are exact after one.
func counters(dir string) error {
	runtime.LockOSThread() // Pdeathsig
	meet := func(name string) error {
		if err := os.WriteFile(filepath.Join(dir, name+os.Getenv("TAPVERBS_RANK")), nil, 0o644); err != nil {
			return err
		}
		for _, rank := range []string{"0", "1"} {
			for {
				if _, err := os.Stat(filepath.Join(dir, name+rank)); err == nil {
					break
				}
				time.Sleep(time.Millisecond)
			}
		}
		return nil
	}
	c, err := pingpong(1 << 30) // for ever
	if err != nil {
		return err
	}
	for seen := map[uint64]bool{}; len(seen) < 4; time.Sleep(time.Millisecond) {
		seen[counter("counters/port_xmit_packets")] = true
	}
	if err := meet("seen"); err != nil {
		return err
	}
	_ = c.Process.Kill()
	_ = c.Wait()
	if err := meet("over"); err != nil {
		return err
	}
	before := map[string]uint64{}
	for _, path := range []string{"hw_counters/rdma_sends", "hw_counters/rdma_recvs", "hw_counters/sent_pkts",
		"counters/port_xmit_packets", "counters/port_rcv_data", "counters/symbol_error"} {
		before[path] = counter(path)
	}
	more := func(path string) uint64 { return counter(path) - before[path] }
	if c, err = pingpong(counterIters); err == nil {
		err = c.Wait()
	}
	if err != nil {
		return err
	}
	for path, want := range map[string]uint64{
		"hw_counters/rdma_sends": counterIters, "hw_counters/rdma_recvs": counterIters, "counters/symbol_error": 0,
	} {
		if got := more(path); got != want {
			return fmt.Errorf("%s is %d more, want %d", path, got, want)
		}
	}
	if got := more("counters/port_rcv_data"); got < counterIters*4096/4 {
		return fmt.Errorf("port_rcv_data is %d words more", got)
	}
	if sent, all := more("hw_counters/sent_pkts"), more("counters/port_xmit_packets"); sent != all {
		return fmt.Errorf("sent_pkts is %d more, port_xmit_packets %d", sent, all)
	}
	return nil
}

// TestCounters: they are live, and go on from program to program.
func TestCounters(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	inFabric(t, []string{asEnv + "=" + asCounters}, 0, 2, exe, t.TempDir())
}

// TestSysfs: what the files say is what the library says.
func TestSysfs(t *testing.T) {
	out := inFabric(t, nil, 0, 1, "sh", "-c", `set -e
cd /sys/class/infiniband/tapverbs0
ibv_devinfo -v > /dev/shm/devinfo.$$
has() { grep -q "$1" /dev/shm/devinfo.$$ || { echo "ibv_devinfo does not say: $1"; cat /dev/shm/devinfo.$$; exit 1; }; }
has "fw_ver:.*$(cat fw_ver)"
has "node_guid:.*$(cat node_guid)"
has "sys_image_guid:.*$(cat sys_image_guid)"
has "state:.*PORT_$(sed 's/.*: //' ports/1/state) ($(sed 's/:.*//' ports/1/state))"
has "phys_state:.*($(sed 's/:.*//' ports/1/phys_state))"
has "link_layer:.*$(cat ports/1/link_layer)"
has "port_cap_flags:.*$(cat ports/1/cap_mask)"
test $(grep -c 'GID\[' /dev/shm/devinfo.$$) = $(ls ports/1/gids | wc -l)
rm /dev/shm/devinfo.$$
test $(cat ports/1/gid_attrs/ndevs/0) = $TAPVERBS_PORT
test $(cat device/net/*/mtu) = 9000
test $(cat /sys/class/infiniband_verbs/uverbs0/ibdev) = tapverbs0
test -c /dev/infiniband/uverbs0
`)
	if out != "" {
		t.Error(out)
	}
}

// TestStateFiles: they follow the port.
func TestStateFiles(t *testing.T) {
	inFabric(t, nil, 0, 1, "sh", "-c", `
state() { until [ "$(cat $TAPVERBS_SYSFS/ports/1/state)/$(cat $TAPVERBS_SYSFS/ports/1/phys_state)" = "$1" ]; do sleep 0.01; done; }
ibv_asyncwatch > /dev/shm/watch.$$ &
until grep -q FD /dev/shm/watch.$$; do sleep 0.01; done
rm /dev/shm/watch.$$
state "4: ACTIVE/5: LinkUp"
ip link set $TAPVERBS_PORT down
state "1: DOWN/3: Disabled"
ip link set $TAPVERBS_PORT up
state "4: ACTIVE/5: LinkUp"
kill $!
test $(cat $TAPVERBS_SYSFS/ports/1/counters/link_downed) = 1
`)
}

// TestUp: an ordinary user, without any namespaces, on ports that root has made.
func TestUp(t *testing.T) {
	readable(t)
	cmd := exec.Command("sh", "-ec", `
as() { setpriv --reuid 65534 --regid 65534 --clear-groups --no-new-privs "$@"; }
tapverbs=$0
$tapverbs up -ports 2 -owner 65534
export LD_LIBRARY_PATH=$1
eval "$($tapverbs env tv0p0)"
as ibv_rc_pingpong -g 1 -c &
until ss -ltn | grep -q :18515; do sleep 0.01; done
eval "$($tapverbs env tv0p1)"
as ibv_rc_pingpong -g 1 -c 127.0.0.1
wait $!
unset LD_LIBRARY_PATH TAPVERBS_PORT TAPVERBS_ADDR TAPVERBS_ADDR6
as $tapverbs run -libs $1 -port tv0p0,tv0p1 -- sh -ec '
if [ $TAPVERBS_RANK = 0 ]; then exec ibv_rc_pingpong -g 1; fi
until ss -ltn | grep -q :18515; do sleep 0.01; done
ibv_rc_pingpong -g 1 127.0.0.1
test $(cat $TAPVERBS_SYSFS/ports/1/hw_counters/rdma_sends) = 1000'
$tapverbs run -libs $1 -port tv0p1 -addr 10.9.0.3/16 -- ibv_devinfo -v
`, bin("tapverbs"), libs())
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	// The loopback interface of the new namespace is brought up by tapverbs up.
	timer := time.AfterFunc(hang, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	out, err := cmd.CombinedOutput()
	if err != nil || strings.Count(string(out), "iters in") != 4 || !strings.Contains(string(out), "::ffff:10.9.0.3") {
		t.Errorf("%v\n%s", err, out)
	}
}

// readable lets other users use what was built.
func readable(t *testing.T) {
	t.Helper()
	if err := filepath.WalkDir(built, func(p string, _ os.DirEntry, err error) error {
		return errors.Join(err, os.Chmod(p, 0o755))
	}); err != nil {
		t.Fatal(err)
	}
}
