// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/tapverbs/tapverbs/mr"
	"github.com/tapverbs/tapverbs/provider"
	"github.com/tapverbs/tapverbs/qp"
)

// engine is a device of this process on our port, with a region.
type engine struct {
	t   *testing.T
	d   *provider.Device
	pd  *provider.PD
	cq  *provider.CQ
	mem *mr.Memory
	mr  *provider.MR
}

const regionLen = 1 << 20

func newEngine(t *testing.T) *engine {
	t.Helper()
	d, err := provider.Open(provider.Config{Port: ourPort, Addrs: []netip.Prefix{netip.MustParsePrefix(ourAddr + "/24"), netip.MustParsePrefix(ourAddr6 + "/64")}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil && !errors.Is(err, provider.ErrClosed) {
			t.Error(err)
		}
	})
	e := &engine{t: t, d: d}
	if e.pd, err = d.AllocPD(); err != nil {
		t.Fatal(err)
	}
	if e.cq, err = d.CreateCQ(64, nil); err != nil {
		t.Fatal(err)
	}
	if e.mem, err = mr.Alloc(regionLen); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.mem.Close() })
	if e.mr, err = e.pd.RegMR(e.mem.Bytes(), mr.LocalWrite|mr.RemoteWrite|mr.RemoteRead|mr.RemoteAtomic); err != nil {
		t.Fatal(err)
	}
	return e
}

func (e *engine) sge(off, n int) []qp.SGE {
	return []qp.SGE{{Addr: uint64(e.mr.Addr()) + uint64(off), Length: uint32(n), LKey: e.mr.LKey()}}
}

// evict takes all of the region out of memory.
func (e *engine) evict() (pages int) {
	n, err := e.mr.Evict(e.mr.IOVA(), regionLen, mr.Stored)
	if err != nil {
		e.t.Error(err)
	}
	return n
}

// Where in the region messages are received, sent from, and where the data is.
const (
	recvAt = 0
	sendAt = 4096
	dataAt = 65536
)

// attr is of a connection with a receive posted.
func (e *engine) attr() provider.ConnAttr {
	return provider.ConnAttr{
		QP:      provider.QPInitAttr{Type: qp.TypeRC, SendCQ: e.cq, RecvCQ: e.cq, Caps: qp.Caps{SendWR: 4, RecvWR: 4, SendSGE: 1, RecvSGE: 1}},
		Prepare: e.receive,
	}
}

func (e *engine) receive(q *provider.QP) error {
	_, err := q.PostRecv([]qp.RecvWR{{SGL: e.sge(recvAt, 4096)}})
	return err
}

// completes waits for a completion of this opcode; others go before it.
func (e *engine) completes(ctx context.Context, op qp.WCOpcode) (qp.WC, error) {
	var wcs [1]qp.WC
	for {
		if _, err := e.cq.Wait(ctx, wcs[:]); err != nil {
			return wcs[0], fmt.Errorf("waiting for %v: %w", op, err)
		}
		if wcs[0].Status != qp.WCSuccess {
			return wcs[0], fmt.Errorf("waiting for %v: %v: %v", op, wcs[0].Opcode, wcs[0].Status)
		}
		if wcs[0].Opcode == op {
			return wcs[0], nil
		}
	}
}

func (e *engine) post(q *provider.QP, wr qp.SendWR) error {
	wr.Flags |= qp.SendSignaled
	_, err := q.PostSend([]qp.SendWR{wr})
	return err
}

// rping's messages: where a buffer is, its key, its length. As the client says where its data
// is, the server reads it and says go on; as the client says where it is wanted, the server
// writes it there and says go on.
type rpingInfo struct {
	Addr uint64
	Key  uint32
	Len  uint32
}

const rpingLen = 16

var errShort = errors.New("a message of another length than rping's")

// say sends a message and waits until it has arrived.
func (e *engine) say(ctx context.Context, c *provider.Conn, i rpingInfo) error {
	b := e.mem.Bytes()[sendAt:]
	binary.BigEndian.PutUint64(b, i.Addr)
	binary.BigEndian.PutUint32(b[8:], i.Key)
	binary.BigEndian.PutUint32(b[12:], i.Len)
	return e.post(c.QP, qp.SendWR{Opcode: qp.WRSend, SGL: e.sge(sendAt, rpingLen)})
}

// hear waits for a message, and posts the next receive.
func (e *engine) hear(ctx context.Context, c *provider.Conn) (i rpingInfo, err error) {
	wc, err := e.completes(ctx, qp.WCRecv)
	if err != nil {
		return i, err
	}
	if wc.ByteLen != rpingLen {
		return i, errShort
	}
	b := e.mem.Bytes()[recvAt:]
	i = rpingInfo{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:])}
	return i, e.receive(c.QP)
}
