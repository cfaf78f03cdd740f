// SPDX-License-Identifier: Apache-2.0

package taptest

import (
	"encoding/binary"
	"os"
)

// Capture reads the frames of a file as tcpdump(8) writes it (pcap, little-endian).
func Capture(path string) (frames [][]byte, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	for b = b[24:]; len(b) > 0; {
		n := int(binary.LittleEndian.Uint32(b[8:]))
		frames = append(frames, b[16:16+n:16+n])
		b = b[16+n:]
	}
	return frames, nil
}
