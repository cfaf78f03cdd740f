// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"slices"
	"time"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/tap"
	"github.com/tapverbs/tapverbs/wire"
)

// Whether super-frames arrive is asked with what every RoCE peer answers that has a connection
// manager, and that means nothing to it: a DREQ for a connection that there is not (IBA
// 12.9.9), of which it says that it has ended. It comes as the last packet of a super-frame as
// large as any; those in front of it are for queue pair 0, which RoCE has not, and are dropped
// as soon as they are looked at. A second DREQ comes alone: who answers that one alone, a few
// times, does not get super-frames. A peer to which the kernel has to take them apart answers
// both. It is the first shard that asks, for all of them.

const (
	// maxProbes is how many destinations are asked at a time.
	maxProbes = 16
	// probeTries questions are asked, each twice as long after the one before.
	probeTries = 4
	probeWait  = int64(50 * time.Millisecond)
)

// smiQPN is the QP of the subnet manager's interface, which there is not on RoCE.
const smiQPN wire.QPN = 0

// prober asks destinations. It belongs to the holder of the baton of the first shard.
type prober struct {
	s    *shard
	list []probe
	due  int64
	path wire.Path // of the question that is being sent
}

type probe struct {
	path   wire.Path
	asker  *shard
	inside uint64 // transaction of the question in the super-frame, and
	alone  uint64 // of the one beside it
	heard  bool   // that one was answered
	tries  int
	at     int64 // when it is the turn of the next
}

func (m *prober) init(s *shard) { m.s, m.due = s, qp.Never }

// askDests has those destinations asked for which that is wanted.
func (s *shard) askDests() {
	first := s.d.sh
	for _, path := range s.eg.dests.wants {
		if s == first {
			s.probes.begin(path, s)
		} else {
			first.tell(s, func() { first.probes.begin(path, s) })
		}
	}
	s.eg.dests.wants = s.eg.dests.wants[:0]
	if s == first && s.probes.due <= s.now {
		s.probes.tick()
	}
}

func (m *prober) begin(path wire.Path, asker *shard) {
	for i := range m.list {
		if keyOf(&m.list[i].path) == keyOf(&path) {
			return
		}
	}
	if len(m.list) == maxProbes || m.s.gone.Load() {
		m.tell(&probe{path: path, asker: asker}, carryUnknown)
		return
	}
	var b [16]byte
	rand.Read(b[:])
	path.SrcPort, path.TClass = udpSourcePort(0, path.Src, path.Dst), path.TClass&^ecnCE
	m.list = append(m.list, probe{path: path, asker: asker, inside: binary.NativeEndian.Uint64(b[:]), alone: binary.NativeEndian.Uint64(b[8:]), at: m.s.now})
	m.due = min(m.due, m.s.now)
}

// tick asks those whose turn it is, and concludes what has been asked often enough.
func (m *prober) tick() {
	now := m.s.now
	for i := 0; i < len(m.list); {
		p := &m.list[i]
		switch e := &m.s.eg; {
		case p.at > now:
		case e.watched() || !e.super.Has(familyOf(p.path.HdrLen())):
			m.conclude(i, carryUnknown)
			continue
		case p.tries == probeTries:
			what := carryMute
			if p.heard {
				what = carryNone
			}
			m.conclude(i, what)
			continue
		default:
			m.ask(p)
			p.at = now + probeWait<<p.tries
			p.tries++
		}
		i++
	}
	m.next()
}

func (m *prober) next() {
	m.due = qp.Never
	for i := range m.list {
		m.due = min(m.due, m.list[i].at)
	}
}

// conclude ends the asking of a destination.
func (m *prober) conclude(i int, what carriage) {
	p := m.list[i]
	m.list = slices.Delete(m.list, i, i+1)
	m.tell(&p, what)
}

// tell tells all shards of an answer.
func (m *prober) tell(p *probe, what carriage) {
	k, asker := keyOf(&p.path), p.asker
	for _, o := range m.s.d.shards {
		if o == m.s {
			o.eg.learn(k, what, o == asker)
		} else {
			o.tell(m.s, func() { o.eg.learn(k, what, o == asker) })
		}
	}
}

// lose ends all questions when the device is gone.
func (m *prober) lose() {
	for len(m.list) > 0 {
		m.conclude(0, carryUnknown)
	}
	m.due = qp.Never
}

// answered takes a DREP if it answers one of our questions.
func (m *prober) answered(p *wire.Packet, h *wire.MADHeader) bool {
	if len(m.list) == 0 || h.Method != wire.MADSend || wire.CMAttr(h.Attr) != wire.CMDREP {
		return false
	}
	for i := range m.list {
		switch q := &m.list[i]; {
		case p.Src() != q.path.Dst:
		case h.TID == q.inside:
			m.s.cnt.SuperProven++
			m.conclude(i, carryAll)
			m.next()
			return true
		case h.TID == q.alone:
			q.heard = true
			return true
		}
	}
	return false
}

// ask sends both questions. If the device is full they are lost.
func (m *prober) ask(p *probe) {
	e := &m.s.eg
	e.flush()
	if e.backlog() {
		return
	}
	m.s.cnt.SuperProbes++
	m.path = p.path
	e.filling = true
	h, n := m.path.HdrLen(), fillerLen+m.s.d.mtu.Bytes()
	// One more would fit, or the frame would be full and leave.
	for k := 1; k+1 < tap.MaxSegments && h+(k+1)*n <= wire.MaxSuper; k++ {
		b := e.Begin(&m.path, n)
		if b == nil {
			break
		}
		putFiller(b)
		m.s.stats.SentPkts.Add(1)
		e.End()
	}
	m.question(p.inside)
	e.filling, e.open = false, false
	m.question(p.alone)
	e.open = false
}

// question is a DREQ for nobody's connection.
func (m *prober) question(tid uint64) {
	b := m.s.sendMAD(&m.path)
	if b == nil {
		return
	}
	h := wire.MADHeader{Class: wire.CMClass, ClassVersion: wire.CMClassVersion, Method: wire.MADSend, TID: tid, Attr: uint16(wire.CMDREQ)}
	h.Put(b)
	q := wire.CMDreq{LocalID: uint32(tid) | 1, RemoteID: uint32(tid>>32) | 1}
	q.Put(b[wire.MADHeaderLen:])
	m.s.eg.End()
}

// fillerLen is how long a packet that fills a super-frame is without payload, with its ICRC.
const fillerLen = wire.BTHLen + wire.DETHLen + wire.ICRCLen

// putFiller makes one: zeros for queue pair 0.
func putFiller(b []byte) {
	bth := wire.BTH{Op: wire.UDSendOnly, PKey: wire.DefaultPKey, DestQP: smiQPN}
	bth.Put(b)
	wire.DETH{QKey: wire.GSIQKey, SrcQP: wire.GSIQPN}.Put(b[wire.BTHLen:])
	clear(b[wire.BTHLen+wire.DETHLen:])
}

// isFiller says whether a packet to queue pair 0 is there to fill a super-frame.
func isFiller(p *wire.Packet) bool {
	return p.Info.Service == wire.ServiceUD && p.DETH().QKey == wire.GSIQKey && p.DETH().SrcQP == wire.GSIQPN
}

// testSuper writes a super-frame of each kind to ourselves, which goes nowhere: no bridge
// sends a frame back where it came from. A kind that the kernel refuses there is not.
// What cannot be had now, as the link is down, is found out later.
func (e *egress) testSuper() {
	for _, a := range e.s.d.gids.addrs {
		path := wire.Path{SrcMAC: e.s.d.mac, DstMAC: e.s.d.mac, Src: a, Dst: a, HopLimit: 1, SrcPort: udpSourcePort(0, a, a)}
		h, n := path.HdrLen(), fillerLen
		kind := familyOf(h)
		if !e.super.Has(kind) || e.tested.Has(kind) {
			continue
		}
		f := e.buf[:h+2*n]
		path.Put(f, n, 0)
		for b := f[h:]; len(b) > 0; b = b[n:] {
			putFiller(b[:n])
		}
		wire.PutSuper(f, f, 2*n)
		e.out[0] = tap.Frame{B: f, GSO: uint16(n)}
		k, err := e.s.dev.WriteBatch(e.out[:1])
		e.out[0] = tap.Frame{}
		switch {
		case k == 1:
			e.tested |= kind
		case err != nil && !errors.Is(err, tap.ErrGone):
			e.refused(kind)
		}
	}
}
