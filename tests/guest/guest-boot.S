# Boot sector of a guest for KVM hosts on which Linux would take too long
#
# SPDX-License-Identifier: GPL-2.0-or-later
#
# Says on the serial port what guest-init.c says: "GUEST-OK turn N memory M MiB
# wrong 0" after each time it has found its memory to be what it wrote, and
# GUEST-BAD once it was not.  Its memory is PAGES pages of eight contents; the
# first WRITTEN of them are written in every turn.
#
# test_kvm.py assembles it.

        .set BASE, 0x1000000
        .set PAGES, 2048        # 8 MiB: Guest.common_mib
        .set WRITTEN, 64
        .set PAUSE, 500000000   # cycles between two turns: time to be merged

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
        movl $0x7000, %esp
        cld

        # the first word of a page counts the turns that have written it
        movl $BASE, %edi
        xorl %ebx, %ebx
fill:   xorl %eax, %eax
        stosl
        call content
        rep stosl
        incl %ebx
        cmpl $PAGES, %ebx
        jb fill

        xorl %ebp, %ebp         # the turn
turn:   movl $BASE, %edi
        xorl %ebx, %ebx
page:   xorl %eax, %eax
        cmpl $WRITTEN, %ebx
        jae 1f
        movl %ebp, %eax
        incl (%edi)
        incl %eax
1:      scasl
        jne wrong
        call content
        repe scasl
        jne wrong
        incl %ebx
        cmpl $PAGES, %ebx
        jb page
        incl %ebp

        movl $digits + 5, %edi  # the turn again, in decimal
2:      incb (%edi)
        cmpb $'9', (%edi)
        jbe 3f
        movb $'0', (%edi)
        decl %edi
        jmp 2b
3:      movl $good, %esi
        call print
        rdtsc
        movl %eax, %ecx
4:      rdtsc
        subl %ecx, %eax
        cmpl $PAUSE, %eax
        jb 4b
        jmp turn

wrong:  movl $bad, %esi
        call print
5:      hlt
        jmp 5b

# In %eax what page %ebx holds, in %ecx how often after its first word.
content:
        movl %ebx, %eax
        andl $7, %eax
        imull $0x01010101, %eax, %eax
        addl $0x61616161, %eax
        movl $1023, %ecx
        ret

# The text at %esi.
print:  lodsb
        testb %al, %al
        jz 7f
        movb %al, %ah
        movw $0x3fd, %dx
6:      inb %dx, %al
        testb $0x20, %al
        jz 6b
        movb %ah, %al
        movw $0x3f8, %dx
        outb %al, %dx
        jmp print
7:      ret

good:   .ascii "GUEST-OK turn "
digits: .asciz "000000 memory 64 MiB wrong 0\n"
bad:    .asciz "GUEST-BAD\n"

        .balign 8
gdt:    .quad 0, 0x00cf9a000000ffff, 0x00cf92000000ffff
gdt_ptr:
        .word gdt_ptr - gdt - 1
        .long gdt
        .org 510
        .byte 0x55, 0xaa
