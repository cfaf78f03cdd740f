// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"
)

// cmMessage is what all messages of CM have.
type cmMessage interface {
	Put(b []byte)
	Parse(b []byte)
}

// newCM gives an empty message of each kind; nil for what is none.
func newCM(a CMAttr) cmMessage {
	switch a {
	case CMREQ:
		return &CMReq{}
	case CMMRA:
		return &CMMra{}
	case CMREJ:
		return &CMRej{}
	case CMREP:
		return &CMRep{}
	case CMRTU:
		return &CMRtu{}
	case CMDREQ:
		return &CMDreq{}
	case CMDREP:
		return &CMDrep{}
	case CMSIDRREQ:
		return &CMSidrReq{}
	case CMSIDRREP:
		return &CMSidrRep{}
	case CMLAP:
		return &CMLap{}
	case CMAPR:
		return &CMApr{}
	}
	return nil
}

// TestGoldenCM holds what the kernel sent to queue pair 1 to: each MAD is a message of CM
// that gives the same bytes again, and all of one connection name the same IDs.
func TestGoldenCM(t *testing.T) {
	seen := map[CMAttr]int{}
	for _, name := range goldenFiles(t) {
		for i, f := range goldenFrames(t, name) {
			var p Packet
			if Parse(f, &p) != nil || p.BTH.DestQP != GSIQPN {
				continue
			}
			h, ok := ParseMAD(p.Payload)
			if !ok || h.Class != CMClass || h.ClassVersion != CMClassVersion || h.Method != MADSend {
				t.Errorf("%s: frame %d is no MAD of CM: %+v", name, i, h)
				continue
			}
			a := CMAttr(h.Attr)
			m := newCM(a)
			if m == nil {
				t.Errorf("%s: frame %d: %v", name, i, a)
				continue
			}
			seen[a]++
			again := make([]byte, MADLen)
			h.Put(again)
			m.Parse(p.Payload[MADHeaderLen:])
			m.Put(again[MADHeaderLen:])
			if !bytes.Equal(again, p.Payload) {
				t.Errorf("%s: frame %d: %v: re-encoded to\n%x, was\n%x", name, i, a, again, p.Payload)
			}
			req, ok := m.(*CMReq)
			if !ok {
				continue
			}
			var ip IPCM
			if !ip.Parse(req.Private[:]) || ip.Src != p.Src() || ip.Dst != p.Dst() {
				t.Errorf("%s: frame %d: addresses %+v, of the packet %v %v", name, i, ip, p.Src(), p.Dst())
			}
			hdr := make([]byte, IPCMLen)
			if ip.Put(hdr); !bytes.Equal(hdr, req.Private[:IPCMLen]) {
				t.Errorf("%s: frame %d: addresses re-encoded to\n%x, were\n%x", name, i, hdr, req.Private[:IPCMLen])
			}
			if ps, port, ok := ServicePort(req.ServiceID); !ok || ps != PSTCP || port == 0 || ServiceID(ps, port) != req.ServiceID {
				t.Errorf("%s: frame %d: service %x", name, i, req.ServiceID)
			}
			if req.LocalQPN == 0 || req.Primary.HopLimit == 0 || req.MTU == 0 || req.PKey != DefaultPKey ||
				netip.AddrFrom16(req.Primary.LocalGID).Unmap() != p.Src() || netip.AddrFrom16(req.Primary.RemoteGID).Unmap() != p.Dst() {
				t.Errorf("%s: frame %d: %+v", name, i, req)
			}
		}
	}
	for _, a := range []CMAttr{CMREQ, CMREJ, CMREP, CMRTU, CMDREQ, CMDREP, CMSIDRREQ, CMSIDRREP} {
		if seen[a] == 0 {
			t.Errorf("no %v in the captures", a)
		}
	}
}

// TestCMRoundTrip: any bytes are a message, and what was read of it is written where it was.
func TestCMRoundTrip(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for a := CMREQ; a <= CMAPR; a++ {
		for range 200 {
			in, out := make([]byte, CMLen), make([]byte, CMLen)
			for i := range in {
				in[i] = byte(rnd.Uint32())
			}
			m, again := newCM(a), newCM(a)
			m.Parse(in)
			m.Put(out)
			for i := range out {
				if out[i]&^in[i] != 0 {
					t.Fatalf("%v: byte %d is %02x, was %02x", a, i, out[i], in[i])
				}
			}
			if again.Parse(out); !reflect.DeepEqual(m, again) {
				t.Fatalf("%v: %+v became %+v", a, m, again)
			}
		}
	}
	if s := (CMAPR + 1).String(); s != "attribute 0x001b" || CMSIDRREQ.String() != "SIDR_REQ" {
		t.Error(s, CMSIDRREQ)
	}
}

func TestIPCMRefuses(t *testing.T) {
	var h, got IPCM
	h = IPCM{SrcPort: 7, Src: netip.MustParseAddr("fd00::1"), Dst: netip.MustParseAddr("fd00::2")}
	b := make([]byte, IPCMLen)
	h.Put(b)
	if !got.Parse(b) || got != h {
		t.Errorf("%+v became %+v", h, got)
	}
	if got.Parse(b[:IPCMLen-1]) {
		t.Error("took a header that is cut short")
	}
	for i, v := range []byte{1, 5 << 4} {
		was := b[i]
		if b[i] = v; got.Parse(b) {
			t.Errorf("took %02x at %d", v, i)
		}
		b[i] = was
	}
	if _, _, ok := ServicePort(0x10_0000_0000_0000); ok {
		t.Error("took any service ID for a port")
	}
}
