// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"strings"
)

// A document has places for the tables: each between a line "<!-- bench NAME -->", by the
// section's name, and the next line "<!-- end -->".

const placeEnd = "<!-- end -->\n"

// place puts a text into the place of that name. Without a place the document stays as it is.
func place(doc, name, text string) (string, error) {
	before, rest, found := strings.Cut(doc, "<!-- bench "+name+" -->\n")
	if !found {
		return doc, nil
	}
	_, after, found := strings.Cut(rest, placeEnd)
	if !found {
		return "", fmt.Errorf("the place for %q has no end", name)
	}
	return before + "<!-- bench " + name + " -->\n" + text + "\n" + placeEnd + after, nil
}

// write puts the sections into the places of a file; what was not asked for keeps its own.
func (b *book) write(file string, only []string) error {
	old, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("the tables: %w", err)
	}
	doc := string(old)
	for _, s := range sections {
		if text := b.text(s, only); text != "" {
			if doc, err = place(doc, s.name, text); err != nil {
				return fmt.Errorf("the tables, %s: %w", file, err)
			}
		}
	}
	if err := os.WriteFile(file, []byte(doc), 0o644); err != nil {
		return fmt.Errorf("the tables: %w", err)
	}
	return nil
}
