// SPDX-License-Identifier: Apache-2.0

package qp

import "github.com/tapverbs/tapverbs/wire"

// transport is what sets the services apart for requester and responder (IBA
// 9.2.1, table 33): everything else is one and the same code.
type transport struct {
	service wire.Service
	// acked: packets are acknowledged, and sent again when they are not. Without,
	// a work request is done when its last packet has left, and what the responder
	// can't take it drops without a word (IBA 9.8.2, 9.8.3).
	acked bool
	// datagram: each work request is one packet with an address handle of its own.
	datagram bool
	// initiator and target are the ends of XRC (xrc.go): without a receive side and
	// without a send side.
	initiator, target bool
	// raw: each work request is a whole Ethernet frame (raw.go).
	raw bool
}

var transports = [...]transport{
	TypeRC: {service: wire.ServiceRC, acked: true},
	TypeUC: {service: wire.ServiceUC},
	TypeUD: {service: wire.ServiceUD, datagram: true},

	TypeRaw: {raw: true},

	TypeXRCSend: {service: wire.ServiceXRC, acked: true, initiator: true},
	TypeXRCRecv: {service: wire.ServiceXRC, acked: true, target: true},
}

// transportOf gives the service's row; nil for services that are not offered.
func transportOf(t Type) *transport {
	switch t {
	case TypeRC, TypeUC, TypeUD, TypeRaw, TypeXRCSend, TypeXRCRecv:
		return &transports[t]
	}
	return nil
}

// opcode gives this service's opcode of an operation, by the RC opcode: the lower
// five bits say what to do, the upper three for which service (IBA 9.2.1).
func (t *transport) opcode(rc wire.Opcode) wire.Opcode {
	return rc | wire.Opcode(t.service)<<5
}
