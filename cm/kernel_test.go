// SPDX-License-Identifier: Apache-2.0

package cm

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/tapverbs/tapverbs/tap/taptest"
	"github.com/tapverbs/tapverbs/wire"
)

// said is a message of a capture.
type said struct {
	src, dst netip.Addr
	attr     wire.CMAttr
	mad      [wire.MADLen]byte
}

// conversation reads the messages of one of the kernel's captures.
func conversation(t *testing.T, name string) (all []said) {
	t.Helper()
	frames, err := taptest.Capture("../wire/testdata/" + name + ".pcap")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range frames {
		var p wire.Packet
		if wire.Parse(f, &p) != nil || p.BTH.DestQP != wire.GSIQPN {
			continue
		}
		if h, ok := wire.ParseMAD(p.Payload); ok && h.Class == wire.CMClass {
			all = append(all, said{p.Src(), p.Dst(), wire.CMAttr(h.Attr), [wire.MADLen]byte(p.Payload)})
		}
	}
	return all
}

// double stands in for one of the two kernels of a capture: it hears what the other one said, its
// application does what the kernel's did, and what it says must be what the kernel said, but for
// the numbers that each picks for itself.
type double struct {
	t     *testing.T
	a     *Agent
	sent  []said
	conns map[uint32]*Conn // by the kernel's communication ID
	// Ours for the kernel's, and the kernel's for ours: of this end's communication IDs, and of
	// its transactions.
	id, idOf   map[uint32]uint32
	tid, tidOf map[uint64]uint64
	told       map[*Conn][]Kind
	// request is what has come last; held waits for us to say what the kernel said before it heard that.
	request *Conn
	held    []said
}

func newDouble(t *testing.T, guid uint64) *double {
	d := &double{t: t, conns: map[uint32]*Conn{}, id: map[uint32]uint32{}, idOf: map[uint32]uint32{}, tid: map[uint64]uint64{},
		tidOf: map[uint64]uint64{}, told: map[*Conn][]Kind{}}
	d.a = New(Config{GUID: guid,
		Send: func(src, dst netip.Addr, mad *[wire.MADLen]byte) {
			h, _ := wire.ParseMAD(mad[:])
			d.sent = append(d.sent, said{src, dst, wire.CMAttr(h.Attr), *mad})
		},
		Event: func(c *Conn, e Event) {
			if e.Kind == Request {
				d.request = c
			}
			d.told[c] = append(d.told[c], e.Kind)
		}})
	return d
}

// Where a MAD has its transaction, the sender's communication ID and the receiver's.
const (
	tidAt    = 8
	localAt  = wire.MADHeaderLen
	remoteAt = wire.MADHeaderLen + 4
)

// remote says whether a message names its receiver's ID, and where.
func (s *said) remote() (at int, ok bool) {
	switch s.attr {
	case wire.CMREQ, wire.CMSIDRREQ:
		return 0, false
	case wire.CMSIDRREP:
		return localAt, true
	}
	return remoteAt, true
}

// hear hands over what the other kernel said, with our numbers for our kernel's.
func (d *double) hear(s said) {
	be := binary.BigEndian
	if at, ok := s.remote(); ok {
		if id, ok := d.id[be.Uint32(s.mad[at:])]; ok {
			be.PutUint32(s.mad[at:], id)
		}
	}
	if tid, ok := d.tid[be.Uint64(s.mad[tidAt:])]; ok {
		be.PutUint64(s.mad[tidAt:], tid)
	}
	d.a.Receive(0, s.src, s.dst, s.mad[:])
}

// say has the application do what the kernel's did, and compares.
func (d *double) say(s said) {
	d.t.Helper()
	be := binary.BigEndian
	local := be.Uint32(s.mad[localAt:])
	body := s.mad[wire.MADHeaderLen:]
	c, err := d.conns[local], error(nil)
	if s.attr != wire.CMDREQ {
		for _, h := range d.held {
			d.hear(h)
		}
		d.held = nil
	}
	switch s.attr {
	case wire.CMREQ:
		var m wire.CMReq
		m.Parse(body)
		p := &m.Primary
		me := Params{Addr: s.src, QPN: m.LocalQPN, PSN: m.StartingPSN, Responder: m.ResponderResources, Initiator: m.InitiatorDepth,
			RetryCount: m.RetryCount, RNRRetry: m.RNRRetry, FlowControl: m.FlowControl, SRQ: m.SRQ, Private: withHead(&s, m.Private[:])}
		c, err = d.a.Connect(0, s.dst, m.ServiceID, RC, me,
			Route{MTU: m.MTU, AckTimeout: p.AckTimeout, PKey: m.PKey, FlowLabel: p.FlowLabel, TrafficClass: p.TrafficClass, HopLimit: p.HopLimit})
	case wire.CMSIDRREQ:
		var m wire.CMSidrReq
		m.Parse(body)
		c, err = d.a.Resolve(0, s.src, s.dst, m.ServiceID, m.PKey, withHead(&s, m.Private[:]))
	case wire.CMREP:
		var m wire.CMRep
		m.Parse(body)
		c = d.asked(m.RemoteID)
		err = c.Accept(0, Params{QPN: m.LocalQPN, PSN: m.StartingPSN, Responder: m.ResponderResources, Initiator: m.InitiatorDepth,
			RNRRetry: m.RNRRetry, FlowControl: m.FlowControl, SRQ: m.SRQ, AckDelay: m.TargetAckDelay, Private: m.Private[:]})
	case wire.CMSIDRREP:
		var m wire.CMSidrRep
		m.Parse(body)
		err = d.request.AcceptService(0, Params{QPN: m.QPN, QKey: m.QKey, Private: m.Private[:]})
	case wire.CMRTU:
		err = c.Ready(0, nil)
	case wire.CMDREQ:
		err = c.Disconnect(0, nil)
	}
	if err != nil {
		d.t.Fatalf("%v: %v", s.attr, err)
	}
	if len(d.sent) == 0 {
		d.t.Fatalf("says nothing where the kernel says %v", s.attr)
	}
	got := d.sent[0]
	d.sent = d.sent[1:]
	if got.attr != s.attr {
		d.t.Fatalf("says %v where the kernel says %v", got.attr, s.attr)
	}
	switch s.attr {
	case wire.CMREQ, wire.CMREP, wire.CMSIDRREQ: // of a number that we pick
		d.conns[local] = c
		ours := be.Uint32(got.mad[localAt:])
		d.id[local], d.idOf[ours] = ours, local
	}
	switch s.attr {
	case wire.CMREQ, wire.CMSIDRREQ, wire.CMDREQ:
		theirs, ours := be.Uint64(s.mad[tidAt:]), be.Uint64(got.mad[tidAt:])
		d.tid[theirs], d.tidOf[ours] = ours, theirs
	}
	if tid, ok := d.tidOf[be.Uint64(got.mad[tidAt:])]; ok {
		be.PutUint64(got.mad[tidAt:], tid)
	}
	if id, ok := d.idOf[be.Uint32(got.mad[localAt:])]; ok {
		be.PutUint32(got.mad[localAt:], id)
	}
	if got.src != s.src || got.dst != s.dst || got.mad != s.mad {
		d.t.Errorf("%v from %v to %v\n%x, the kernel's from %v to %v\n%x", s.attr, got.src, got.dst, got.mad, s.src, s.dst, s.mad)
	}
}

// asked is the connection that somebody asks for by an ID of his.
func (d *double) asked(id uint32) *Conn {
	d.t.Helper()
	for c := range d.told {
		if c.remoteID == id && c.state == stateReqRcvd {
			return c
		}
	}
	d.t.Fatalf("no request of %#x", id)
	return nil
}

// withHead makes private data anew: RDMA CM's header for IPv4, and what the application had.
func withHead(s *said, private []byte) []byte {
	b := make([]byte, wire.IPCMLen)
	var h wire.IPCM
	h.Parse(private)
	(&wire.IPCM{SrcPort: h.SrcPort, Src: s.src, Dst: s.dst}).Put(b)
	return append(b, private[wire.IPCMLen:]...)
}

// TestAsKernel: in either end's place of what two kernels said to each other, an agent says the same
// as that end did, and its application hears what has happened.
func TestAsKernel(t *testing.T) {
	connected := func(disconnected Kind) []Kind { return []Kind{Reply, disconnected} }
	accepted := func(disconnected Kind) []Kind { return []Kind{Request, Established, disconnected} }
	for _, c := range []struct {
		name           string
		client, server []Kind
		listens        bool
	}{
		{"cm-rping-v4", connected(Ended), accepted(Disconnected), true},
		{"cm-rping-v4-lossy", connected(Disconnected), accepted(Ended), true},
		{"cm-rstream-v4", connected(Ended), accepted(Disconnected), true},
		{"cm-rdma_client-server-v4", connected(Ended), accepted(Ended), true}, // both disconnect
		{"cm-ucmatose-v4", connected(Disconnected), accepted(Ended), true},
		{"cm-udaddy-sidr-v4", []Kind{Resolved, Gone}, []Kind{Request}, true},
		{"cm-rping-rej-no-listener", []Kind{Rejected, Gone}, nil, false},
	} {
		all := conversation(t, c.name)
		if len(all) < 2 {
			t.Fatalf("%s: %d messages", c.name, len(all))
		}
		client := all[0].src
		for _, at := range []netip.Addr{client, all[0].dst} {
			t.Run(fmt.Sprintf("%s/%v", c.name, at), func(t *testing.T) {
				n := at.As4()[3]
				d := newDouble(t, 0x505400fffe770000|uint64(n))
				want := c.client
				if at != client {
					want = c.server
					if c.listens {
						if _, err := d.a.Listen(serviceOf(&all[0]), netip.Addr{}, 8); err != nil {
							t.Fatal(err)
						}
					}
				}
				for _, s := range all {
					switch {
					case s.src == at:
						d.say(s)
					case s.attr == wire.CMDREQ: // who may say the same before it hears that
						d.held = append(d.held, s)
					default:
						d.hear(s)
					}
				}
				for _, s := range d.sent {
					t.Errorf("says %v where the kernel says nothing", s.attr)
				}
				if st := d.a.Stats(); st.Malformed != 0 || st.Resent != 0 {
					t.Errorf("%+v", st)
				}
				if len(want) > 0 && len(d.told) == 0 {
					t.Error("the application has heard nothing")
				}
				for _, told := range d.told {
					if !slices.Equal(told, want) {
						t.Errorf("the application has heard %v, want %v", told, want)
					}
				}
			})
		}
	}
}

// serviceOf is the service that a message asks for.
func serviceOf(s *said) uint64 {
	if s.attr == wire.CMSIDRREQ {
		var m wire.CMSidrReq
		m.Parse(s.mad[wire.MADHeaderLen:])
		return m.ServiceID
	}
	var m wire.CMReq
	m.Parse(s.mad[wire.MADHeaderLen:])
	return m.ServiceID
}
