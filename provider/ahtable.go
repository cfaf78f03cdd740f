// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"

	"github.com/tapverbs/tapverbs/qp"
	"github.com/tapverbs/tapverbs/wire"
)

// ahTable gives address handles the numbers by which work requests name them. It
// belongs to the holder of the baton.
type ahTable struct {
	rows []*AH // row 0 is empty, so that a work request without a handle names none
	gens []uint16
	free []uint32
}

// A number has the row in its lower bits and a generation above, so that a work
// request with a handle that was destroyed does not meet the row's next one.
const (
	ahRowBits = 17 // maxAH rows and row 0
	ahRowMask = 1<<ahRowBits - 1
)

func (t *ahTable) add(h *AH) {
	var row uint32
	if n := len(t.free); n > 0 {
		row, t.free = t.free[n-1], t.free[:n-1]
	} else {
		if len(t.rows) == 0 {
			t.rows, t.gens = append(t.rows, nil), append(t.gens, 0)
		}
		row = uint32(len(t.rows))
		t.rows, t.gens = append(t.rows, nil), append(t.gens, 0)
	}
	t.rows[row] = h
	h.index = uint32(t.gens[row])<<ahRowBits | row
	t.gens[row] = (t.gens[row] + 1) & (1<<(32-ahRowBits) - 1)
}

func (t *ahTable) remove(h *AH) {
	row := h.index & ahRowMask
	t.rows[row] = nil
	t.free = append(t.free, row)
}

// get gives the handle of a number, nil if there is none.
func (t *ahTable) get(index uint32) *AH {
	if row := index & ahRowMask; int(row) < len(t.rows) {
		if h := t.rows[row]; h != nil && h.index == index {
			return h
		}
	}
	return nil
}

// ahPath is what QPs ask for the path of a datagram.
func (s *shard) ahPath(q *qp.QP, index uint32) *wire.Path {
	h := s.ahs.get(index)
	if h == nil || h.pd.num != q.PD() {
		return nil
	}
	if h.neigh != nil {
		// Nobody acknowledges a datagram: only asking tells whether the MAC is
		// still the peer's.
		s.probe(h.neigh, staleAfter, false)
	}
	return &h.path
}

// AHFromGRH makes the address vector that answers a datagram, from the 40 bytes
// that its receive buffer begins with (ibv_init_ah_from_wc(3)): back to the sender,
// from the address it was sent to. ErrInvalid if grh is shorter or no such header,
// or if the datagram was sent to an address that is not the device's: for one that
// was sent to a group, our first address of the family is chosen.
func (d *Device) AHFromGRH(grh []byte) (a AHAttr, err error) {
	if len(grh) < wire.GRHLen {
		return a, fmt.Errorf("GRH of %d bytes: %w", len(grh), ErrInvalid)
	}
	var src, dst GID
	switch {
	case grh[0]>>4 == 6:
		src, dst = GID(grh[8:24]), GID(grh[24:40])
		w := be.Uint32(grh)
		a.FlowLabel, a.TrafficClass, a.HopLimit = w&0xfffff, uint8(w>>20), grh[7]
	case grh[20]>>4 == 4: // 20 bytes of nothing, then the IPv4 header
		src, dst = v4GID([4]byte(grh[32:])), v4GID([4]byte(grh[36:]))
		a.TrafficClass, a.HopLimit = grh[21], grh[28]
	default:
		return a, fmt.Errorf("GRH % x: %w", grh[:24], ErrInvalid)
	}
	a.DGID, a.PortNum, a.SGIDIndex = src, 1, -1
	group := dst.Addr().IsMulticast()
	for i, g := range d.gids.addrs {
		if g == dst.Addr() || group && g.Is4() == dst.Addr().Is4() {
			a.SGIDIndex = i
			break
		}
	}
	if a.SGIDIndex < 0 || src.Addr().IsMulticast() || src.Addr().IsUnspecified() {
		return AHAttr{}, fmt.Errorf("datagram from %v to %v: %w", src, dst, ErrInvalid)
	}
	return a, nil
}

func v4GID(b [4]byte) GID { return GID{10: 0xff, 11: 0xff, 12: b[0], 13: b[1], 14: b[2], 15: b[3]} }
