// SPDX-License-Identifier: Apache-2.0

package provider

import "github.com/tapverbs/tapverbs/wire"

// The general services interface: management datagrams that come to queue pair 1 (IBA
// 13.5.1). Each goes to whom its class belongs to; what nobody speaks, or is no MAD, is
// dropped without a word (IBA 13.5.3.3), and counted.

// inputGSI takes a packet to queue pair 1.
func (s *shard) inputGSI(p *wire.Packet) {
	switch {
	case p.Info.Service != wire.ServiceUD:
		s.drop(DropMAD)
		return
	case !pkeyMatch(p.BTH.PKey, wire.DefaultPKey):
		s.drop(DropPKey)
		return
	case p.DETH().QKey != wire.GSIQKey:
		s.stats.QKeyViolations.Add(1)
		s.drop(DropMAD)
		return
	}
	h, ok := wire.ParseMAD(p.Payload)
	if !ok {
		s.drop(DropMAD)
		return
	}
	switch h.Class {
	case wire.ResidencyClass:
		if !s.inputResidency(p) {
			s.drop(DropMAD)
		}
	case wire.CMClass:
		if !s.probes.answered(p, &h) {
			s.cm.input(p)
		}
	default:
		s.drop(DropMAD)
	}
}

// sendMAD reserves a MAD to queue pair 1 of who is at the other end of a path, and
// returns its 256 bytes; nil if there is no room, and it is lost. eg.End sends it. The
// path is copied.
func (s *shard) sendMAD(to *wire.Path) []byte {
	s.madPath = *to
	s.madPath.SrcPort = udpSourcePort(0, to.Src, to.Dst)
	info := wire.UDSendOnly.Info()
	b := s.eg.Begin(&s.madPath, info.HdrLen+wire.MADLen+wire.ICRCLen)
	if b == nil {
		return nil
	}
	s.stats.SentPkts.Add(1)
	s.madPSN = s.madPSN.Next()
	bth := wire.BTH{Op: wire.UDSendOnly, PKey: wire.DefaultPKey, DestQP: wire.GSIQPN, PSN: s.madPSN}
	bth.Put(b)
	wire.DETH{QKey: wire.GSIQKey, SrcQP: wire.GSIQPN}.Put(b[info.DETH:])
	return b[info.HdrLen : info.HdrLen+wire.MADLen]
}
