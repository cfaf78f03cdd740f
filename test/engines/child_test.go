// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// scenarioEnv names the scenario that this process is to run instead of tests:
// those that need processes of their own, to have two of them, or to end them when
// they hang.
const scenarioEnv = "TAPVERBS_ENGINES_SCENARIO"

var scenarios = map[string]func() error{
	"twin": twin, "twin-peer": twinPeer, "storm": storm, "collect": collect, "big": big, "kernel-moves": kernelMoves, "moves": moves,
	"conns": conns, "conns-peer": connsPeer,
}

func TestMain(m *testing.M) {
	name := os.Getenv(scenarioEnv)
	if name == "" {
		os.Exit(m.Run())
	}
	f, ok := scenarios[name]
	err := fmt.Errorf("no scenario %q", name)
	if ok {
		err = f()
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// hang is how long something may take that has not hung: the machine may be very busy.
const hang = 2 * time.Minute

// scenario is a command that runs one. It dies with the thread that starts it.
func scenario(ctx context.Context, name string, env ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Env = append(append(os.Environ(), scenarioEnv+"="+name), env...)
	cmd.Stderr = os.Stderr
	// One that hangs says where.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGQUIT) }
	cmd.WaitDelay = hang // the stacks are written by a busy machine, too
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// runScenario runs one to its end, or fails the test when it takes too long.
func runScenario(t *testing.T, limit time.Duration, start func(*exec.Cmd) (func() error, error), name string, env ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := scenario(ctx, name, env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	wait, err := start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	err = wait()
	switch {
	case ctx.Err() != nil:
		t.Fatalf("it hangs: not done after %v\n%s", limit, tail(out.Bytes()))
	case err != nil:
		t.Fatalf("%v\n%s", err, tail(out.Bytes()))
	}
	t.Logf("%s", out.Bytes())
}

func tail(b []byte) []byte { return b[max(0, len(b)-40000):] }
