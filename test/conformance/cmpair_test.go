// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tapverbs/tapverbs/internal/fabric"
)

// Pairs of programs that find each other by the RDMA CM. No table of the kernel has its
// listeners; so testdata/listening.c is loaded before the server, which tells of them by
// a TCP socket. And some servers serve for ever: they are ended when the client has ended.
const (
	// asCMPair runs the server as rank 0 and, once that listens, the client as rank 1.
	asCMPair = "cmpair"
	// foreverEnv is set if the server has to be ended.
	foreverEnv = "CONFORMANCE_FOREVER"
	// preloadEnv names a library that both load before.
	preloadEnv = "CONFORMANCE_PRELOAD"
)

// cmListenPort is what listening.c tells at, cmDonePort where the server's rank waits for
// the client's end.
const (
	cmListenPort = 18515
	cmDonePort   = 18516
)

// runCM runs a server and a client, each with its arguments, in which $TAPVERBS_ADDR and
// $TAPVERBS_PEER mean the rank's, and gives what both printed.
func runCM(t *testing.T, env []string, server, client string) string {
	t.Helper()
	args := slices.Concat([]string{"--"}, strings.Fields(server), []string{"--"}, strings.Fields(client))
	return runRanks(t, append(env, asEnv+"="+asCMPair, "CONFORMANCE_LISTENING="+bin("listening.so")), args...)
}

// cmPair is a rank of runCM.
func cmPair(args []string) error {
	i := slices.Index(args, "--")
	server, client := args[:i], args[i+1:]
	if os.Getenv("TAPVERBS_RANK") == "0" {
		return cmServer(server)
	}
	for !fabric.Listens(0, cmListenPort) {
		time.Sleep(time.Millisecond) // nothing tells when another process listens
	}
	c, err := start(client, os.Getenv(preloadEnv))
	if err == nil {
		err = c.Wait()
	}
	if err != nil {
		return fmt.Errorf("client: %w", err)
	}
	done, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", cmDonePort))
	if err != nil {
		return err
	}
	return done.Close()
}

func cmServer(args []string) (failed error) {
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", cmDonePort))
	if err != nil {
		return err
	}
	if file := os.Getenv(captureEnv); file != "" {
		fd, err := sniffer()
		if err != nil {
			return fmt.Errorf("listening at the port: %w", err)
		}
		defer func() { failed = errors.Join(failed, writeCapture(fd, file)) }()
	}
	c, err := start(args, strings.TrimSpace(os.Getenv(preloadEnv)+" "+os.Getenv("CONFORMANCE_LISTENING")))
	if err != nil {
		return err
	}
	if os.Getenv(foreverEnv) == "" {
		if err := c.Wait(); err != nil {
			return fmt.Errorf("server: %w", err)
		}
		_, err = l.Accept() // the client, too, has ended well
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	accepted := make(chan error, 1)
	go func() {
		_, err := l.Accept()
		accepted <- err
	}()
	select {
	case err := <-ended:
		return errors.Join(errors.New("the server ended by itself"), err)
	case err := <-accepted:
		_ = c.Process.Signal(syscall.SIGTERM)
		<-ended
		return err
	}
}

// start starts a command with its output in a file of this rank.
func start(args []string, preload string) (*exec.Cmd, error) {
	for i, a := range args {
		args[i] = os.ExpandEnv(a)
	}
	f, err := os.Create(filepath.Join(os.Getenv(outEnv), os.Getenv("TAPVERBS_RANK")))
	if err != nil {
		return nil, err
	}
	c := exec.Command(args[0], args[1:]...)
	c.Stdout, c.Stderr = f, f
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if preload != "" {
		c.Env = append(os.Environ(), "LD_PRELOAD="+preload)
	}
	return c, c.Start()
}
