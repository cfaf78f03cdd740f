// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"

	"github.com/tapverbs/tapverbs/qp"
)

// FlowType is the kind of a flow, with the values of enum ibv_flow_attr_type.
type FlowType uint8

// Kinds of flows (ibv_create_flow(3)). steer.go says who gets what.
const (
	FlowNormal       FlowType = iota // frames that match the specs
	FlowAllDefault                   // frames that nobody else takes
	FlowMcastDefault                 // those of them that are multicast
	FlowSniffer                      // a copy of each frame received or sent
)

// maxFlows bounds the flows of a device: a frame is compared with one after the other.
const maxFlows = 4096

// FlowAttr says what frames a flow brings to its QP (struct ibv_flow_attr).
type FlowAttr struct {
	Type FlowType
	// Priority of FlowNormal: the lowest number comes first.
	Priority uint16
	// Port is 1.
	Port uint8
	// DontTrap leaves the frame to flows of lower priority, and to the engine, too.
	DontTrap bool
	// Specs are filters, all of which must match, and actions. Each kind may be
	// there once; only FlowNormal takes filters.
	Specs []FlowSpec
}

// FlowSpec is a filter (EthSpec, IPv4Spec, IPv6Spec, TCPSpec, UDPSpec) or an action
// (TagAction, DropAction, CountAction).
type FlowSpec interface {
	// addTo makes the spec part of a rule; ErrInvalid if it can't be.
	addTo(r *flowRule) error
}

// Flow is a rule that brings frames to a RAW_PACKET QP.
type Flow struct {
	q        *QP
	typ      FlowType
	priority uint16
	dontTrap bool
	rule     flowRule
	dead     bool
}

// CreateFlow has the QP receive the frames that the attributes describe
// (ibv_create_flow(3)). ErrInvalid for attributes that make no sense or contradict
// each other, ErrNotSupported if the QP is UD (its datagrams come by address, not by
// flows), ErrNoMem at 4096 flows.
func (q *QP) CreateFlow(a FlowAttr) (*Flow, error) {
	if err := q.s.d.alive(); err != nil {
		return nil, err
	}
	switch {
	case q.dead.Load():
		return nil, ErrClosed
	case q.init.Type == qp.TypeUD:
		return nil, fmt.Errorf("flows of UD queue pairs: %w", ErrNotSupported)
	case q.init.Type != qp.TypeRaw:
		return nil, fmt.Errorf("flow of a %v queue pair: %w", q.init.Type, ErrInvalid)
	case a.Type > FlowSniffer || a.Port != 1 || a.DontTrap && a.Type != FlowNormal:
		return nil, fmt.Errorf("flow of type %d, port %d: %w", a.Type, a.Port, ErrInvalid)
	}
	f := &Flow{q: q, typ: a.Type, priority: a.Priority, dontTrap: a.DontTrap}
	for _, spec := range a.Specs {
		if err := spec.addTo(&f.rule); err != nil {
			return nil, err
		}
	}
	if err := f.rule.check(); err != nil {
		return nil, err
	}
	if f.rule.filters() && a.Type != FlowNormal {
		return nil, fmt.Errorf("filters in a flow of type %d: %w", a.Type, ErrInvalid)
	}
	s := q.s
	s.lock()
	defer s.release()
	c := f.rule.count
	switch {
	case q.gone || c != nil && c.dead:
		return nil, ErrClosed
	case c != nil && c.s != s:
		return nil, fmt.Errorf("counters of another device: %w", ErrInvalid)
	case s.flows.n >= maxFlows:
		return nil, fmt.Errorf("%d flows: %w", maxFlows, ErrNoMem)
	}
	s.flows.add(f)
	s.noteFlows()
	q.flows++
	if c != nil {
		c.bound++
	}
	return f, nil
}

// Destroy ends the flow (ibv_destroy_flow(3)): ErrClosed twice.
func (f *Flow) Destroy() error {
	s := f.q.s
	if s.d.closed.Load() {
		return ErrClosed
	}
	s.lock()
	defer s.release()
	if f.dead {
		return ErrClosed
	}
	s.flows.remove(f)
	s.noteFlows()
	f.end()
	return nil
}

// end is called when the flow is out of the table.
func (f *Flow) end() {
	f.dead = true
	f.q.flows--
	if c := f.rule.count; c != nil {
		c.bound--
	}
}

// dropFlows ends what is left of a QP's flows, when the device is closed.
func (s *shard) dropFlows(q *QP) {
	if q.flows == 0 {
		return
	}
	t := &s.flows
	for _, list := range [...]*[]*Flow{&t.normal, &t.defaults, &t.sniffers} {
		kept := (*list)[:0]
		for _, f := range *list {
			if f.q != q {
				kept = append(kept, f)
				continue
			}
			t.n--
			f.end()
		}
		clear((*list)[len(kept):])
		*list = kept
	}
}
