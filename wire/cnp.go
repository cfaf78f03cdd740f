// SPDX-License-Identifier: Apache-2.0

package wire

// The 16 bytes behind the BTH of a CNP are reserved: zero when they are sent, and nobody looks at
// them (IBA A17.9.3). Between tapverbs engines they may say how many packets the receiver
// has room for; for all others such a packet is a CNP like any, and asks for less.

// cnpWindowTag is what they begin with then.
const cnpWindowTag = 0x7476_776e

// PutCNPWindow fills the CNPLen bytes behind the BTH of a CNP: packets is how many the receiver
// has room for from this sender, 1 to 65535; 0: it says nothing of that.
func PutCNPWindow(b []byte, packets uint16) {
	clear(b[:CNPLen])
	if packets != 0 {
		be.PutUint32(b, cnpWindowTag)
		be.PutUint16(b[4:], packets)
	}
}

// CNPWindow reads from a parsed CNP what PutCNPWindow wrote; 0 if it says nothing.
func (p *Packet) CNPWindow() uint16 {
	if b := p.Frame[p.BTHOff+BTHLen:]; p.Info.Kind == KindCNP && be.Uint32(b) == cnpWindowTag {
		return be.Uint16(b[4:])
	}
	return 0
}
