// SPDX-License-Identifier: Apache-2.0

package wire

import "net/netip"

// What RDMA CM adds to CM: IP addresses and ports. A service is a port of a port space; who
// asks for one says in the first bytes of the private data from where and to where (IBA
// annex A11, RDMA IP CM service).

// PortSpace is a space of RDMA CM's ports, with the numbers of rdma_create_id(3). Those of
// TCP and UDP hold the number of the IP protocol.
type PortSpace uint16

// The port spaces.
const (
	PSIPoIB PortSpace = 0x0002
	PSTCP   PortSpace = 0x0106 // connected: RC
	PSUDP   PortSpace = 0x0111 // datagrams: UD
	PSIB    PortSpace = 0x013f // any service, for InfiniBand's own addresses
)

// ServiceID spells a port as CM's service ID.
func ServiceID(ps PortSpace, port uint16) uint64 { return uint64(ps)<<16 | uint64(port) }

// ServicePort takes a service ID apart; false if it is no port of a port space.
func ServicePort(id uint64) (ps PortSpace, port uint16, ok bool) {
	switch ps = PortSpace(id >> 16); ps {
	case PSIPoIB, PSTCP, PSUDP, PSIB:
		return ps, uint16(id), id>>32 == 0
	}
	return 0, 0, false
}

// IPCMLen is the length in bytes of the header.
const IPCMLen = 36

// IPCM is the header in front of the private data of REQ and SIDR_REQ (IBA annex A11).
type IPCM struct {
	SrcPort  uint16
	Src, Dst netip.Addr // of one family, without zones
}

// Put writes the header to b[:IPCMLen].
func (h *IPCM) Put(b []byte) {
	clear(b[:IPCMLen])
	b[1] = 6 << 4
	put := func(b []byte, a netip.Addr) { c := a.As16(); copy(b, c[:]) }
	if h.Dst.Is4() {
		b[1] = 4 << 4
		put = func(b []byte, a netip.Addr) { c := a.As4(); copy(b[12:], c[:]) }
	}
	be.PutUint16(b[2:], h.SrcPort)
	put(b[4:20], h.Src)
	put(b[20:36], h.Dst)
}

// Parse takes the header from b; false if it is none: too short, or of another version.
func (h *IPCM) Parse(b []byte) bool {
	if len(b) < IPCMLen || b[0] != 0 {
		return false
	}
	h.SrcPort = be.Uint16(b[2:])
	switch b[1] >> 4 {
	case 4:
		h.Src, h.Dst = netip.AddrFrom4([4]byte(b[16:])), netip.AddrFrom4([4]byte(b[32:]))
	case 6:
		h.Src, h.Dst = netip.AddrFrom16([16]byte(b[4:])), netip.AddrFrom16([16]byte(b[20:]))
	default:
		return false
	}
	return true
}
