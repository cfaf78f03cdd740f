// SPDX-License-Identifier: Apache-2.0

package tap_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tapverbs/tapverbs/tap"
)

// The host's own UDP stack as the sender: it leaves checksums to the device, and with
// UDP_SEGMENT (udp(7)) sends super-frames.

var (
	hostMAC   = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	engineMAC = net.HardwareAddr{2, 0, 0, 0, 0, 2}
	engine4   = netip.MustParseAddrPort("10.92.0.2:4791")
	engine6   = netip.MustParseAddrPort("[fd92::2]:4791")
)

// withHost gives the netdev of an open TAP the host's addresses and the engine as
// its neighbour.
func withHost(name string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetHardwareAddr(l, hostMAC); err != nil {
		return err
	}
	if err := netlink.LinkSetMTU(l, 9000); err != nil {
		return err
	}
	if err := netlink.LinkSetIP6AddrGenMode(l, 1); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return err
	}
	for _, s := range []string{"10.92.0.1/24", "fd92::1/64"} {
		a, err := netlink.ParseAddr(s)
		if err != nil {
			return err
		}
		a.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(l, a); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	for _, a := range []netip.AddrPort{engine4, engine6} {
		if err := netlink.NeighSet(&netlink.Neigh{
			LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT,
			IP: a.Addr().AsSlice(), HardwareAddr: engineMAC,
		}); err != nil {
			return err
		}
	}
	return nil
}

// send sends data from the host to the engine, as segments of seg bytes if not 0.
func send(to netip.AddrPort, data []byte, seg int) error {
	family, sa := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Port: int(to.Port()), Addr: [4]byte(to.Addr().AsSlice()[:4])})
	if to.Addr().Is6() {
		family, sa = unix.AF_INET6, &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if seg != 0 {
		if err := unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_SEGMENT, seg); err != nil {
			return err
		}
	}
	return unix.Sendto(fd, data, 0, sa)
}

// udp finds the UDP header of a frame from the host.
func udp(b []byte) (hdr, payload []byte, pseudo uint32) {
	at := 34
	if binary.BigEndian.Uint16(b[12:]) == 0x86dd {
		at = 54
	}
	for i := at - 8; i < at; i += 2 { // IPv4: both addresses are here
		pseudo += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if at == 54 {
		for i := 22; i < at-8; i += 2 {
			pseudo += uint32(binary.BigEndian.Uint16(b[i:]))
		}
	}
	pseudo += 17
	return b[at : at+8], b[at+8:], pseudo
}

// checksumOK verifies the UDP checksum of a whole frame (RFC 768, RFC 8200 8.1).
func checksumOK(b []byte) bool {
	hdr, payload, s := udp(b)
	seg := append(append([]byte{}, hdr...), payload...)
	s += uint32(len(seg))
	if len(seg)%2 == 1 {
		seg = append(seg, 0)
	}
	for i := 0; i < len(seg); i += 2 {
		s += uint32(binary.BigEndian.Uint16(seg[i:]))
	}
	for s > 0xffff {
		s = s&0xffff + s>>16
	}
	return s == 0xffff && binary.BigEndian.Uint16(hdr[6:]) != 0
}

// readUDP reads n frames to the engine's port, past what the host sends of its own
// (multicast listener reports).
func readUDP(t *testing.T, d tap.Device, n int) (fs []tap.Frame) {
	t.Helper()
	for len(fs) < n {
		f := readAll(t, d, 1)[0]
		if f.B[0]&1 != 0 {
			continue
		}
		fs = append(fs, f)
	}
	return fs
}

func payloadOf(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

func TestChecksumOfHostFrames(t *testing.T) {
	both(t, func(t *testing.T, plain bool) {
		inNS(t, func() error {
			d, err := tap.Open(tap.Config{Name: "h0", Plain: plain})
			if err != nil {
				return err
			}
			defer d.Close()
			if err := withHost("h0"); err != nil {
				return err
			}
			for _, to := range []netip.AddrPort{engine4, engine6} {
				for _, n := range []int{1, 2, 999, 8000} {
					data := payloadOf(n)
					if err := send(to, data, 0); err != nil {
						return err
					}
					f := readUDP(t, d, 1)[0]
					_, payload, _ := udp(f.B)
					if f.GSO != 0 || !bytes.Equal(payload, data) || !checksumOK(f.B) {
						t.Errorf("%v, %d bytes: gso %d, payload ok %v, checksum ok %v", to, n, f.GSO, bytes.Equal(payload, data), checksumOK(f.B))
					}
				}
			}
			return nil
		})
	})
}

func TestSuperFrames(t *testing.T) {
	inNS(t, func() error {
		const seg, total = 1000, 20500
		data := payloadOf(total)
		d, err := tap.Open(tap.Config{Name: "h0"})
		if err != nil {
			return err
		}
		defer d.Close()
		if err := withHost("h0"); err != nil {
			return err
		}
		for _, to := range []netip.AddrPort{engine4, engine6} {
			if err := send(to, data, seg); err != nil {
				return err
			}
			f := readUDP(t, d, 1)[0]
			_, payload, _ := udp(f.B)
			if f.GSO != seg || !bytes.Equal(payload, data) {
				t.Errorf("%v: gso %d, %d of %d bytes", to, f.GSO, len(payload), total)
			}
			// It does not fit, so nothing of it is delivered.
			if err := send(to, data, seg); err != nil {
				return err
			}
			in, before := buffers(2, 9014), d.(tap.StatsReader).Stats().RxTruncated
			for d.(tap.StatsReader).Stats().RxTruncated == before {
				await(t, d)
				n, err := d.ReadBatch(in)
				if err != nil {
					return err
				}
				for _, f := range in[:n] {
					if f.B[0]&1 == 0 {
						t.Errorf("cut super-frame: %d bytes delivered", len(f.B))
					}
				}
			}
		}
		if s := d.(tap.StatsReader).Stats(); s.RxSuper != 2 || s.RxTruncated != 2 {
			t.Errorf("%+v", s)
		}
		return nil
	})
}

// A persistent TAP keeps what its last user negotiated. Whoever opens it without
// super-frames must not get any.
func TestOffloadsEndWithTheirUser(t *testing.T) {
	for _, second := range []tap.Config{{Plain: true}, {Without: tap.USO4 | tap.USO6}} {
		inNS(t, func() error {
			const seg = 1000
			data := payloadOf(3 * seg)
			l := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "h0", TxQLen: 100}, Mode: netlink.TUNTAP_MODE_TAP}
			if err := netlink.LinkAdd(l); err != nil {
				return err
			}
			d, err := tap.Open(tap.Config{Name: "h0"})
			if err != nil {
				return err
			}
			if err := withHost("h0"); err != nil {
				return err
			}
			if err := send(engine4, data, seg); err != nil {
				return err
			}
			if f := readUDP(t, d, 1)[0]; f.GSO != seg {
				t.Errorf("first user: gso %d", f.GSO)
			}
			d.Close()
			second.Name = "h0"
			if d, err = tap.Open(second); err != nil {
				return err
			}
			defer d.Close()
			if err := send(engine4, data, seg); err != nil {
				return err
			}
			for i, f := range readUDP(t, d, 3) {
				_, payload, _ := udp(f.B)
				if f.GSO != 0 || !bytes.Equal(payload, data[i*seg:(i+1)*seg]) || !checksumOK(f.B) {
					t.Errorf("second user, frame %d: gso %d, %d bytes", i, f.GSO, len(payload))
				}
			}
			return nil
		})
	}
}
