// SPDX-License-Identifier: Apache-2.0

// Package tap moves batches of Ethernet frames in and out of a TAP device.
//
// A [Device] is opened in one of two ways: plain (through songgao/water, one
// frame per read or write, nothing in front of it) or with a vnet header
// (struct virtio_net_hdr in front of each frame, which lets the kernel hand over
// frames whose checksum is not filled in yet and UDP super-frames). Both speak
// to the same netdev, and a plain device on one port of a bridge understands a
// vnet device on another.
//
// Nothing blocks and nothing allocates once a device is open. The file
// descriptor behind a device can be polled; see [Device.FD].
//
// Sources: Documentation/networking/tuntap.rst and include/uapi/linux/if_tun.h
// of the kernel; virtio 1.2 section 5.1.6 for the vnet header.
package tap

import "strings"

const (
	// EthHeaderLen is the length in bytes of an Ethernet header without a VLAN tag.
	EthHeaderLen = 14
	// VLANTagLen is the length in bytes of one 802.1Q tag.
	VLANTagLen = 4
	// MaxFrame is the longest frame or super-frame in bytes a device carries:
	// an IP datagram of 64 KiB with its Ethernet header and a VLAN tag. A buffer
	// of this size never sees a frame cut.
	MaxFrame = 65535 + EthHeaderLen + VLANTagLen
)

// Frame is one frame in or out, from the Ethernet header on, without FCS.
type Frame struct {
	// B holds the frame. The caller owns the memory; a device keeps no
	// reference to it after the call it was passed to.
	B []byte
	// GSO is the segment size in bytes (of the UDP or TCP payload) of a
	// super-frame, 0 for a single frame. The transport checksum of a super-frame
	// is not filled in: it holds the sum of the pseudo header only. WriteBatch takes
	// those of UDP, with B holding at least the headers, on devices that have USO4
	// or USO6.
	GSO uint16
	// More are pieces that follow B, for WriteBatch, at most MaxPieces; ReadBatch sets none.
	More [][]byte
}

// MaxPieces is how many pieces a frame may have behind B, and MaxSegments how many segments
// a super-frame: UDP_MAX_SEGMENTS, which kernels hold them to since Linux 6.7, and which
// was 64 up to 6.8.
const (
	MaxPieces   = 128
	MaxSegments = 64
)

// Device moves batches of frames. One reader and one writer may run at once;
// several concurrent calls of ReadBatch (or of WriteBatch) may not. No call blocks.
type Device interface {
	// Name is the name of the netdev, such as "tap0".
	Name() string
	// MTU is the netdev's MTU now: bytes after the Ethernet header.
	MTU() int
	// FD is a descriptor to poll: POLLIN means that there are frames to read,
	// POLLERR that the device is gone. It is -1 for an in-memory device and
	// after Close. Reading or closing it is not for the caller.
	FD() int
	// ReadBatch reads up to len(fs) frames into fs[i].B[:cap(fs[i].B)] and
	// reslices fs[i].B to the frame. It returns 0 and no error when there is
	// nothing to read. A frame longer than its buffer is dropped and counted,
	// never delivered cut. When err is not nil the first n frames are valid.
	ReadBatch(fs []Frame) (n int, err error)
	// WriteBatch writes the frames in order and returns how many were taken.
	// n < len(fs) without an error means that the device is full now; with an
	// error, that fs[n] is what the error is about.
	WriteBatch(fs []Frame) (n int, err error)
	// Offloads tells what was negotiated with the kernel.
	Offloads() Offload
	// Close gives the descriptor back. A TAP that is not persistent disappears.
	Close() error
}

// Unplugger is implemented by devices that can give their port up before they are
// closed, as though it had been taken away.
type Unplugger interface {
	// Unplug detaches from the port, which others can attach to from then on. What is
	// asked of the device later fails with ErrGone. The descriptor's number stays in use
	// until Close, as there may be others who know it. A TAP that is not persistent
	// disappears. ErrGone for the second time, and after Close.
	Unplug() error
}

// Steerer is implemented by devices that are one of several queues of a TAP.
type Steerer interface {
	// Steer has an eBPF program choose the queue of each frame that the kernel sends to any
	// of the queues, by its descriptor (BPF_PROG_TYPE_SOCKET_FILTER; TUNSETSTEERINGEBPF, Linux 4.16);
	// what it returns is taken modulo their number, in the order in which they were opened. With -1
	// the kernel chooses again. The TAP keeps the program until then, or Close.
	Steer(prog int) error
}

// Offload is a set of what a device and the kernel have agreed upon.
type Offload uint32

const (
	// VnetHdr says that a virtio_net_hdr travels in front of each frame.
	VnetHdr Offload = 1 << iota
	// CSUM says that the kernel may send frames whose transport checksum is
	// not filled in (TUN_F_CSUM). ReadBatch fills it in for single frames.
	CSUM
	// USO4 says that the kernel may send UDP/IPv4 super-frames (TUN_F_USO4, Linux 6.2).
	USO4
	// USO6 says that the kernel may send UDP/IPv6 super-frames (TUN_F_USO6, Linux 6.2).
	USO6
)

// Has reports whether all of want was negotiated.
func (o Offload) Has(want Offload) bool { return o&want == want }

// String lists the names of the bits, such as "vnet,csum,uso4,uso6", or "none".
func (o Offload) String() string {
	var names []string
	for _, b := range [...]struct {
		bit  Offload
		name string
	}{{VnetHdr, "vnet"}, {CSUM, "csum"}, {USO4, "uso4"}, {USO6, "uso6"}} {
		if o.Has(b.bit) {
			names = append(names, b.name)
		}
	}
	if names == nil {
		return "none"
	}
	return strings.Join(names, ",")
}

// Stats counts what passed through a device since it was opened.
type Stats struct {
	RxFrames uint64 // frames delivered by ReadBatch
	RxBytes  uint64 // bytes of them, from the Ethernet header on
	RxSuper  uint64 // those of RxFrames that are super-frames
	// RxTruncated counts frames dropped because the reader's buffer was shorter.
	RxTruncated uint64
	// RxMalformed counts frames dropped because their vnet header points
	// outside of the frame.
	RxMalformed uint64
	TxFrames    uint64 // frames taken by WriteBatch
	TxBytes     uint64 // bytes of them, from the Ethernet header on
	TxSuper     uint64 // those of TxFrames that are super-frames
	// TxFull counts the calls of WriteBatch that ended early because the
	// device was full.
	TxFull uint64
}

// Add adds what another queue has counted.
func (s *Stats) Add(o Stats) {
	s.RxFrames += o.RxFrames
	s.RxBytes += o.RxBytes
	s.RxSuper += o.RxSuper
	s.RxTruncated += o.RxTruncated
	s.RxMalformed += o.RxMalformed
	s.TxFrames += o.TxFrames
	s.TxBytes += o.TxBytes
	s.TxSuper += o.TxSuper
	s.TxFull += o.TxFull
}

// StatsReader is implemented by every device of this package and of taptest.
type StatsReader interface {
	// Stats returns a snapshot. It may be called at any time from any goroutine.
	Stats() Stats
}
