# Boot sector of ksm-payload-test
#
# SPDX-License-Identifier: GPL-2.0-or-later
#
# Every CPU counts on each of its own pages, in an order that jumps about,
# with pauses in between that let the pages be merged.  The counter of each
# page must be the number of passes so far: a write that was lost shows up.
#
# Assembled:  gcc -m32 -c ksm-payload.S -o p.o
#             ld -m elf_i386 -Ttext 0x7c00 --oformat binary p.o -o p.bin
# and written into ksm-payload.h by hand, so that no test needs an assembler.

        .set STATE, 0x9000      # 64 bytes per CPU: pass, pos, failed, ...
        .set BASE, 0x1000000    # pages of CPU 0; see ksm-payload.h
        .set PAGES, 2048        # per CPU
        .set AP_START, 0x8000   # where an application processor starts
        .set READY, 0x8ff0      # 1: the firmware is done
        .set GO, 0x8ff4         # the test has filled memory
        .set APIC, 0xfee00000

        .code16
        .globl _start
_start: cli
        xorw %ax, %ax
        movw %ax, %ds
        inb $0x92, %al          # A20, as far as the firmware has not
        orb $2, %al
        andb $0xfe, %al
        outb %al, $0x92
        lgdtw gdt_ptr
        movl %cr0, %eax
        orb $1, %al
        movl %eax, %cr0
        ljmpw $8, $flat

        .code32
flat:   movw $16, %ax
        movw %ax, %ds
        movw %ax, %es
        movw %ax, %ss
        movl $APIC, %ebp
        movl 0x20(%ebp), %eax   # APIC id
        shrl $24, %eax
        jnz count
        # the first one: ljmp $0, $0x7c00 for the others, then wake them
        movl $0x007c00ea, AP_START
        movw $0, AP_START + 4
        movl $0x000c4500, 0x300(%ebp)   # INIT to all but self
        movl $50000, %ecx
1:      loop 1b
        movl $0x000c4608, 0x300(%ebp)   # start at AP_START
        movl $1, READY
        xorl %eax, %eax

count:  cmpl $0, GO
        je count
        movl %eax, %ebx
        shll $6, %ebx
        addl $STATE, %ebx
        movl %eax, %edi
        shll $23, %edi          # PAGES pages of 4096 bytes
        addl $BASE, %edi
        xorl %esi, %esi         # pass
pass:   xorl %ecx, %ecx
next:   imull $1619, %ecx, %eax
        andl $(PAGES - 1), %eax
        shll $12, %eax
        movl (%edi, %eax), %edx
        cmpl %esi, %edx
        jne failed
        incl (%edi, %eax)
        incl %ecx
        movl %ecx, 4(%ebx)
        testb $63, %cl
        jnz 2f
        rdtsc                   # some KVM hosts emulate each instruction:
        movl %eax, %ebp         # only the clock tells how long a pause is
1:      rdtsc
        subl %ebp, %eax
        cmpl delay, %eax
        jb 1b
2:      cmpl $PAGES, %ecx
        jb next
        incl %esi
        movl %esi, (%ebx)
        jmp pass

failed: movl %eax, 12(%ebx)     # which page
        movl %edx, 16(%ebx)     # what it says
        movl $1, 8(%ebx)
1:      hlt
        jmp 1b

        .balign 8
gdt:    .quad 0, 0x00cf9a000000ffff, 0x00cf92000000ffff
gdt_ptr:
        .word gdt_ptr - gdt - 1
        .long gdt
        .org 0x1f8
delay:  .long 0                 # cycles of a pause; the test fills it in
        .word 0
        .byte 0x55, 0xaa
