// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/tapverbs/tapverbs/wire"
)

// The out-of-band exchange of rdma-core's ibv_rc_pingpong (libibverbs/examples):
// over TCP each end says where its queue pair is, in one write of destLen bytes,
// a NUL at the end included; the client speaks first. When the client has the
// server's line it writes doneMsg, also with its NUL.
const (
	destLen = len("0000:000000:000000:00000000000000000000000000000000") + 1
	doneMsg = "done\x00"
)

// tapverbsLID is the LID by which two pingpongs know each other. RoCE has no LIDs:
// ibv_rc_pingpong says 0 and ignores what it is told.
const tapverbsLID = 0x7476

// exchangeTime bounds each step of the exchange but the server's wait for a
// client. A server resolves its peer's MAC before it answers, and one that has its socket from
// who started it may still be starting.
const exchangeTime = 20 * time.Second

// dest says where a queue pair is (struct pingpong_dest).
type dest struct {
	LID uint16
	QPN wire.QPN
	PSN wire.PSN
	GID [16]byte
}

// ours says whether the other end is pingpong as well.
func (d dest) ours() bool { return d.LID == tapverbsLID }

// encode gives the line with its NUL. The GID is in the order of its bytes: the
// original prints four words in network byte order (gid_to_wire_gid).
func (d dest) encode() []byte {
	return fmt.Appendf(nil, "%04x:%06x:%06x:%s\x00", d.LID, uint32(d.QPN)&wire.QPNMask, uint32(d.PSN)&wire.PSNMask,
		hex.EncodeToString(d.GID[:]))
}

// parseDest reads a line of destLen bytes.
func parseDest(b []byte) (dest, error) {
	var d dest
	s, _, nul := strings.Cut(string(b), "\x00")
	f := strings.Split(s, ":")
	bad := fmt.Errorf("out-of-band message %q is not of the form lid:qpn:psn:gid", s)
	if !nul || len(b) != destLen || len(f) != 4 || len(f[0]) != 4 || len(f[1]) != 6 || len(f[2]) != 6 {
		return d, bad
	}
	lid, err1 := strconv.ParseUint(f[0], 16, 16)
	qpn, err2 := strconv.ParseUint(f[1], 16, 24)
	psn, err3 := strconv.ParseUint(f[2], 16, 24)
	gid, err4 := hex.DecodeString(f[3])
	if err := errors.Join(err1, err2, err3, err4); err != nil || len(gid) != len(d.GID) {
		return d, bad
	}
	d.LID, d.QPN, d.PSN = uint16(lid), wire.QPN(qpn), wire.PSN(psn)
	copy(d.GID[:], gid)
	if d.GID == [16]byte{} {
		return d, errors.New("the peer sent no GID: give ibv_rc_pingpong -g and the index of its RoCE v2 address")
	}
	return d, nil
}

// listen opens the server's TCP socket: at addr, or the one that the caller of
// this process opened ("fd:N").
func listen(addr string) (net.Listener, error) {
	if n, ok := strings.CutPrefix(addr, "fd:"); ok {
		fd, err := strconv.Atoi(n)
		if err != nil || fd < 3 {
			return nil, fmt.Errorf("-listen %s: want fd: and the number of an open socket", addr)
		}
		f := os.NewFile(uintptr(fd), "listener")
		defer f.Close()
		return net.FileListener(f)
	}
	return net.Listen("tcp", tcpAddr(addr))
}

// accept waits for a client and reads where its queue pair is.
func accept(ctx context.Context, l net.Listener) (net.Conn, dest, error) {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	conn, err := l.Accept()
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, dest{}, err
	}
	d, err := readDest(conn)
	if err != nil {
		conn.Close()
		return nil, dest{}, err
	}
	return conn, d, nil
}

// answer tells the client where our queue pair is and waits until it says that it
// is connected too.
func answer(conn net.Conn, mine dest) error {
	if _, err := conn.Write(mine.encode()); err != nil {
		return fmt.Errorf("telling the client our address: %w", err)
	}
	b := make([]byte, len(doneMsg))
	if err := conn.SetReadDeadline(time.Now().Add(exchangeTime)); err != nil {
		return err
	}
	if _, err := io.ReadFull(conn, b); err != nil || string(b) != doneMsg {
		return fmt.Errorf("the client did not finish the out-of-band exchange (%s)", errText(err, "wrong answer"))
	}
	return conn.SetReadDeadline(time.Time{})
}

// dial connects to a server, tells it where our queue pair is, and reads its own.
// The caller connects its QP and then calls finish.
func dial(ctx context.Context, addr string, mine dest) (net.Conn, dest, error) {
	d := net.Dialer{Timeout: exchangeTime}
	conn, err := d.DialContext(ctx, "tcp", tcpAddr(addr))
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, dest{}, err
	}
	if _, err = conn.Write(mine.encode()); err == nil {
		var peer dest
		if peer, err = readDest(conn); err == nil {
			return conn, peer, nil
		}
	}
	conn.Close()
	return nil, dest{}, err
}

// finish tells the server that our QP is connected.
func finish(conn net.Conn) error {
	_, err := conn.Write([]byte(doneMsg))
	return err
}

func readDest(conn net.Conn) (dest, error) {
	if err := conn.SetReadDeadline(time.Now().Add(exchangeTime)); err != nil {
		return dest{}, err
	}
	b := make([]byte, destLen)
	if n, err := io.ReadFull(conn, b); err != nil {
		return dest{}, fmt.Errorf("the peer at %s sent %d of the %d bytes of its address (%s)", conn.RemoteAddr(), n, destLen,
			errText(err, ""))
	}
	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		return dest{}, err
	}
	return parseDest(b)
}

// errText says in a few words what went wrong on a TCP connection.
func errText(err error, none string) string {
	var ne net.Error
	switch {
	case err == nil:
		return none
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "connection closed"
	case errors.As(err, &ne) && ne.Timeout():
		return "no answer in time"
	}
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Err.Error()
	}
	return err.Error()
}
