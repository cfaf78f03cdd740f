// SPDX-License-Identifier: Apache-2.0

// Package agent is how the lab's host has commands run in its guest: a TCP connection for
// each, on a link of its own that carries nothing else. When the host closes the connection
// first, the command and all that it has started, as far as it is in its process group, is killed.
package agent

import (
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// Port is where the guest listens for commands, HelloPort where the host listens for the
// guest's word that it is up.
const (
	Port      = 4792
	HelloPort = 4793
)

// request begins a connection. Input follows, as the standard input.
type request struct{ Line string }

// input is a piece of the standard input; without bytes, its end.
type input struct{ Data []byte }

// output is a piece of what the command prints, or its exit status (128 and the signal's
// number, if that has ended it).
type output struct {
	Out, Err []byte
	Done     bool
	Status   int
}

// outWriter sends what it is given as output.
type outWriter struct {
	mu    *sync.Mutex
	enc   *gob.Encoder
	isErr bool
}

func (w outWriter) Write(b []byte) (int, error) {
	o := output{Out: b}
	if w.isErr {
		o = output{Err: b}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(b), w.enc.Encode(o)
}

// Serve runs what the connections of l ask for, with sh.
func Serve(l net.Listener) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			if err := session(c); err != nil && !errors.Is(err, io.EOF) {
				fmt.Fprintln(os.Stderr, "agent:", err)
			}
		}()
	}
}

// linger is how long the output of processes that a command leaves behind is waited for.
const linger = 200 * time.Millisecond

func session(c net.Conn) error {
	dec, enc := gob.NewDecoder(c), gob.NewEncoder(c)
	var r request
	if err := dec.Decode(&r); err != nil {
		return err
	}
	var mu sync.Mutex
	cmd := exec.Command("/bin/sh", "-c", r.Line)
	cmd.Stdout, cmd.Stderr = outWriter{&mu, enc, false}, outWriter{&mu, enc, true}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.WaitDelay = linger
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return enc.Encode(output{Done: true, Status: 127, Err: []byte(err.Error() + "\n")})
	}
	done := make(chan struct{})
	go func() {
		var err error
		for err == nil {
			var i input
			if err = dec.Decode(&i); err == nil && len(i.Data) == 0 {
				_ = stdin.Close()
			} else if err == nil {
				_, _ = stdin.Write(i.Data) // a command need not read all of it
			}
		}
		select {
		case <-done: // the host has got the status
		default:
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		}
	}()
	err = cmd.Wait()
	close(done)
	o := output{Done: true, Status: cmd.ProcessState.ExitCode()}
	if w, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		o.Status = 128 + int(w.Signal())
	}
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) && !errors.Is(err, exec.ErrWaitDelay) {
		o.Err = []byte(err.Error() + "\n")
	}
	mu.Lock()
	defer mu.Unlock()
	return enc.Encode(o)
}

// Run has a line of shell run by the agent at addr, with what stdin holds (nil for none), and
// gives its exit status. When the context ends, the command does, and the error is the
// context's; any other error says that the guest is lost.
func Run(ctx context.Context, addr, line string, stdin io.Reader, stdout, stderr io.Writer) (status int, err error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return -1, err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	defer func() {
		if err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
	}()
	enc, dec := gob.NewEncoder(c), gob.NewDecoder(c)
	if err := enc.Encode(request{line}); err != nil {
		return -1, err
	}
	go func() {
		b := make([]byte, 256<<10)
		for stdin != nil {
			n, err := stdin.Read(b)
			if n > 0 && enc.Encode(input{b[:n]}) != nil {
				return
			}
			if err != nil {
				break
			}
		}
		_ = enc.Encode(input{})
	}()
	for {
		var o output
		if err := dec.Decode(&o); err != nil {
			return -1, fmt.Errorf("the guest has closed the connection: %w", err)
		}
		if _, err := stdout.Write(o.Out); err != nil {
			return -1, err
		}
		if _, err := stderr.Write(o.Err); err != nil {
			return -1, err
		}
		if o.Done {
			return o.Status, nil
		}
	}
}
