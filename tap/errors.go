// SPDX-License-Identifier: Apache-2.0

package tap

import "errors"

// The errors of Open, FromFD and of the batch calls. Those that are returned
// carry what was being done and what can be done about it around the sentinel;
// test with errors.Is.
var (
	// ErrNoTUN: this machine (or container) has no usable /dev/net/tun.
	ErrNoTUN = errors.New("no TUN/TAP driver")
	// ErrPermission: the process may not open /dev/net/tun, or not this TAP.
	ErrPermission = errors.New("not permitted")
	// ErrBusy: another descriptor holds the TAP (or all of its queues).
	ErrBusy = errors.New("in use")
	// ErrName: the name cannot be that of a netdev (1 to 15 bytes, no '/', ':'
	// or white space; see dev_valid_name in the kernel).
	ErrName = errors.New("not a valid device name")
	// ErrNotTAP: the name or descriptor belongs to something that is not a TAP,
	// or to one made with another multi-queue setting.
	ErrNotTAP = errors.New("not a fitting TAP device")
	// ErrGone: the device was taken away underneath, or it was closed.
	ErrGone = errors.New("device is gone")
	// ErrDown: the netdev is administratively down, so the kernel refuses frames
	// (EIO). It may come back up. An error that is ErrDown is ErrGone as well,
	// so that a caller who does not care for the difference need not look.
	ErrDown = errors.New("link is down")
	// ErrSuperFrame: WriteBatch was given a frame with GSO set, which this device
	// does not send.
	ErrSuperFrame = errors.New("super-frames cannot be sent on this device")
	// ErrFrameLen: WriteBatch was given a frame shorter than an Ethernet header
	// or longer than MaxFrame.
	ErrFrameLen = errors.New("frame length out of range")
)
