// SPDX-License-Identifier: Apache-2.0

package top

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/provider"
)

// ErrEnded: there is no such process any more, or it has closed the device.
var ErrEnded = errors.New("has ended, or closed the device")

// ErrSilent: the process does not answer, as it is stopped, say.
var ErrSilent = errors.New("does not answer")

const (
	answerTimeout = 10 * time.Second
	maxAnswer     = 64 << 20
)

// Ask has the device tell what it has and does, with maps of so many parts. It gives the
// line of JSON, too. Errors are ErrEnded, ErrSilent, and others.
func (t Target) Ask(parts int) (*provider.Snapshot, []byte, error) {
	line, err := t.ask(parts)
	if dismissed(err) {
		// It is ending, or there were too many who looked.
		line, err = t.ask(parts)
	}
	switch {
	case err == nil:
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ECONNREFUSED):
		return nil, nil, fmt.Errorf("%v: %w", t, ErrEnded)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, unix.EAGAIN), dismissed(err):
		return nil, nil, fmt.Errorf("%v: %w", t, ErrSilent)
	default:
		return nil, nil, fmt.Errorf("%v: %w", t, err)
	}
	var a struct {
		provider.Snapshot
		Error string `json:"error"`
	}
	if err := json.Unmarshal(line, &a); err != nil {
		return nil, nil, fmt.Errorf("%v: what it answers cannot be read: %w", t, err)
	}
	switch {
	case a.Version != provider.SnapshotVersion:
		return nil, nil, fmt.Errorf("%v: its answers are of version %d, and this program reads %d", t, a.Version, provider.SnapshotVersion)
	case a.Error != "":
		return nil, nil, fmt.Errorf("%v: %s", t, clean(a.Error))
	}
	return &a.Snapshot, line, nil
}

func dismissed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE)
}

// ask gives one line of answer.
func (t Target) ask(parts int) ([]byte, error) {
	d, err := openDir(t.Dir)
	defer d.close()
	if err != nil {
		return nil, err
	}
	c, _, err := d.dial(t.Name)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return nil, err
	}
	if _, err := fmt.Fprintf(c, "snapshot %d\n", parts); err != nil {
		return nil, err
	}
	if err := c.CloseWrite(); err != nil {
		return nil, err
	}
	line, err := io.ReadAll(io.LimitReader(c, maxAnswer))
	switch {
	case err != nil:
		return nil, err
	case len(line) == 0:
		return nil, io.EOF
	case !bytes.HasSuffix(line, []byte("\n")):
		return nil, errors.New("its answer has no end")
	}
	return bytes.TrimSpace(line), nil
}
