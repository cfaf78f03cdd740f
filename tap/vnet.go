// SPDX-License-Identifier: Apache-2.0

package tap

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// The vnet header: struct virtio_net_hdr, 10 bytes in the machine's byte order
// (virtio 1.2 section 5.1.6; include/uapi/linux/virtio_net.h).
const (
	vnetHdrLen = 10

	vnetFlags      = 0 // u8
	vnetGSOType    = 1 // u8
	vnetHdrLenOff  = 2 // u16, not to be relied upon in what the kernel sends
	vnetGSOSize    = 4 // u16
	vnetCsumStart  = 6 // u16, from the Ethernet header on
	vnetCsumOffset = 8 // u16, from vnetCsumStart on

	vnetNeedsCsum = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM
	vnetGSOUDP    = 5 // VIRTIO_NET_HDR_GSO_UDP_L4
)

// Bits of TUNSETOFFLOAD that x/sys does not name on every version
// (include/uapi/linux/if_tun.h).
const (
	tunFCSUM = 0x01
	tunFUSO4 = 0x20
	tunFUSO6 = 0x40
)

// openVnet attaches with IFF_VNET_HDR and negotiates.
func openVnet(cfg Config) (*dev, error) {
	fd, err := openTUN(cfg.Name)
	if err != nil {
		return nil, err
	}
	req, err := setIff(fd, cfg.Name, iffFlags(cfg)|unix.IFF_VNET_HDR)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	off, err := negotiate(fd, req.Name(), cfg.Without)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return newDev(fd, req.Name(), off)
}

// negotiate fixes the header's length and byte order, which a persistent TAP keeps
// from its former user, and asks for as many offloads as the kernel knows.
func negotiate(fd int, name string, without Offload) (Offload, error) {
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, vnetHdrLen); err != nil {
		return 0, explain("set the vnet header length of tap", name, err)
	}
	// Native order. A kernel without the ioctl knows no other.
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETLE, 0); err != nil && err != unix.EINVAL {
		return 0, explain("set the vnet header's byte order of tap", name, err)
	}
	// The kernel answers EINVAL to a set with any bit it does not know, and to
	// one of the USO bits without the other (Linux 6.2 brought both).
	for _, try := range [...]struct {
		bits int
		off  Offload
	}{
		{tunFCSUM | tunFUSO4 | tunFUSO6, CSUM | USO4 | USO6},
		{tunFCSUM, CSUM},
		{0, 0},
	} {
		if try.off&without != 0 {
			continue
		}
		err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, try.bits)
		if err == nil {
			return VnetHdr | try.off, nil
		}
		if err != unix.EINVAL {
			return 0, explain("set the offloads of tap", name, err)
		}
	}
	return 0, fmt.Errorf("set the offloads of tap %q: the kernel refuses even none: %w", name, unix.EINVAL)
}

// resetOffloads takes every offload off a TAP.
func resetOffloads(fd int, name string) error {
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, 0); err != nil {
		return explain("take the offloads off tap", name, err)
	}
	return nil
}
