// What nvcc 13.0.88 makes of gather.cu, by packaging/ptx.py.
#pragma once

namespace jaxmpi {

constexpr char kGatherPtx[] = R"ptx(
.version 8.0
.target sm_70
.address_size 64
.visible .entry jaxmpi_gather(
	.param .u64 jaxmpi_gather_param_0
)
{
	.reg .pred 	%p<39>;
	.reg .b16 	%rs<19>;
	.reg .b32 	%r<117>;
	.reg .b64 	%rd<318>;
	ld.param.u64 	%rd147, [jaxmpi_gather_param_0];
	cvta.to.global.u64 	%rd148, %rd147;
	mov.u32 	%r5, %ctaid.x;
	mul.wide.u32 	%rd149, %r5, 24;
	add.s64 	%rd150, %rd148, %rd149;
	ld.global.nc.u64 	%rd1, [%rd150+16];
	ld.global.nc.u64 	%rd2, [%rd150];
	ld.global.nc.u64 	%rd3, [%rd150+8];
	or.b64  	%rd4, %rd3, %rd2;
	and.b64  	%rd151, %rd4, 15;
	setp.eq.s64 	%p1, %rd151, 0;
	@%p1 bra 	$L__BB0_32;
	and.b64  	%rd152, %rd4, 3;
	setp.eq.s64 	%p2, %rd152, 0;
	@%p2 bra 	$L__BB0_18;
	and.b64  	%rd153, %rd4, 1;
	setp.eq.b64 	%p3, %rd153, 1;
	mov.pred 	%p4, 0;
	xor.pred  	%p5, %p3, %p4;
	not.pred 	%p6, %p5;
	@%p6 bra 	$L__BB0_4;
	bra.uni 	$L__BB0_3;
$L__BB0_4:
	shr.u64 	%rd155, %rd1, 63;
	add.s64 	%rd156, %rd1, %rd155;
	shr.s64 	%rd5, %rd156, 1;
	mov.u32 	%r6, %tid.x;
	cvt.u64.u32 	%rd282, %r6;
	mov.u32 	%r1, %ntid.x;
	mul.lo.s32 	%r7, %r1, 3;
	cvt.u64.u32 	%rd7, %r7;
	add.s64 	%rd157, %rd282, %rd7;
	setp.ge.s64 	%p7, %rd157, %rd5;
	@%p7 bra 	$L__BB0_7;
	shl.b32 	%r8, %r1, 2;
	cvt.u64.u32 	%rd8, %r8;
	cvt.u64.u32 	%rd9, %r1;
	shl.b32 	%r9, %r1, 1;
	cvt.u64.u32 	%rd10, %r9;
	shl.b64 	%rd160, %rd9, 1;
	shl.b64 	%rd162, %rd10, 1;
$L__BB0_6:
	shl.b64 	%rd158, %rd282, 1;
	add.s64 	%rd159, %rd3, %rd158;
	ld.u16 	%rs1, [%rd159];
	add.s64 	%rd161, %rd159, %rd160;
	ld.u16 	%rs2, [%rd161];
	add.s64 	%rd163, %rd159, %rd162;
	ld.u16 	%rs3, [%rd163];
	shl.b64 	%rd164, %rd7, 1;
	add.s64 	%rd165, %rd159, %rd164;
	ld.u16 	%rs4, [%rd165];
	add.s64 	%rd166, %rd2, %rd158;
	st.u16 	[%rd166], %rs1;
	add.s64 	%rd167, %rd166, %rd160;
	st.u16 	[%rd167], %rs2;
	add.s64 	%rd168, %rd166, %rd162;
	st.u16 	[%rd168], %rs3;
	add.s64 	%rd169, %rd166, %rd164;
	st.u16 	[%rd169], %rs4;
	add.s64 	%rd282, %rd282, %rd8;
	add.s64 	%rd170, %rd282, %rd7;
	setp.lt.s64 	%p8, %rd170, %rd5;
	@%p8 bra 	$L__BB0_6;
$L__BB0_7:
	setp.ge.s64 	%p9, %rd282, %rd5;
	@%p9 bra 	$L__BB0_17;
	cvt.u64.u32 	%rd14, %r1;
	not.b64 	%rd171, %rd282;
	add.s64 	%rd15, %rd5, %rd171;
	and.b64  	%rd172, %rd15, -4294967296;
	setp.eq.s64 	%p10, %rd172, 0;
	@%p10 bra 	$L__BB0_10;
	div.u64 	%rd277, %rd15, %rd14;
	bra.uni 	$L__BB0_11;
$L__BB0_32:
	shr.s64 	%rd216, %rd1, 63;
	shr.u64 	%rd217, %rd216, 60;
	add.s64 	%rd218, %rd1, %rd217;
	shr.s64 	%rd79, %rd218, 4;
	mov.u32 	%r29, %tid.x;
	cvt.u64.u32 	%rd304, %r29;
	mov.u32 	%r3, %ntid.x;
	mul.lo.s32 	%r30, %r3, 3;
	cvt.u64.u32 	%rd81, %r30;
	add.s64 	%rd219, %rd304, %rd81;
	setp.ge.s64 	%p23, %rd219, %rd79;
	@%p23 bra 	$L__BB0_35;
	shl.b32 	%r31, %r3, 2;
	cvt.u64.u32 	%rd82, %r31;
	cvt.u64.u32 	%rd83, %r3;
	shl.b32 	%r32, %r3, 1;
	cvt.u64.u32 	%rd84, %r32;
	shl.b64 	%rd222, %rd83, 4;
	shl.b64 	%rd224, %rd84, 4;
$L__BB0_34:
	shl.b64 	%rd220, %rd304, 4;
	add.s64 	%rd221, %rd3, %rd220;
	ld.v4.u32 	{%r33, %r34, %r35, %r36}, [%rd221];
	add.s64 	%rd223, %rd221, %rd222;
	ld.v4.u32 	{%r41, %r42, %r43, %r44}, [%rd223];
	add.s64 	%rd225, %rd221, %rd224;
	ld.v4.u32 	{%r49, %r50, %r51, %r52}, [%rd225];
	shl.b64 	%rd226, %rd81, 4;
	add.s64 	%rd227, %rd221, %rd226;
	ld.v4.u32 	{%r57, %r58, %r59, %r60}, [%rd227];
	add.s64 	%rd228, %rd2, %rd220;
	st.v4.u32 	[%rd228], {%r33, %r34, %r35, %r36};
	add.s64 	%rd229, %rd228, %rd222;
	st.v4.u32 	[%rd229], {%r41, %r42, %r43, %r44};
	add.s64 	%rd230, %rd228, %rd224;
	st.v4.u32 	[%rd230], {%r49, %r50, %r51, %r52};
	add.s64 	%rd231, %rd228, %rd226;
	st.v4.u32 	[%rd231], {%r57, %r58, %r59, %r60};
	add.s64 	%rd304, %rd304, %rd82;
	add.s64 	%rd232, %rd304, %rd81;
	setp.lt.s64 	%p24, %rd232, %rd79;
	@%p24 bra 	$L__BB0_34;
$L__BB0_35:
	setp.ge.s64 	%p25, %rd304, %rd79;
	@%p25 bra 	$L__BB0_45;
	cvt.u64.u32 	%rd88, %r3;
	not.b64 	%rd233, %rd304;
	add.s64 	%rd89, %rd79, %rd233;
	and.b64  	%rd234, %rd89, -4294967296;
	setp.eq.s64 	%p26, %rd234, 0;
	@%p26 bra 	$L__BB0_38;
	div.u64 	%rd299, %rd89, %rd88;
	bra.uni 	$L__BB0_39;
$L__BB0_18:
	shr.s64 	%rd185, %rd1, 63;
	shr.u64 	%rd186, %rd185, 62;
	add.s64 	%rd187, %rd1, %rd186;
	shr.s64 	%rd42, %rd187, 2;
	mov.u32 	%r13, %tid.x;
	cvt.u64.u32 	%rd293, %r13;
	mov.u32 	%r2, %ntid.x;
	mul.lo.s32 	%r14, %r2, 3;
	cvt.u64.u32 	%rd44, %r14;
	add.s64 	%rd188, %rd293, %rd44;
	setp.ge.s64 	%p15, %rd188, %rd42;
	@%p15 bra 	$L__BB0_21;
	shl.b32 	%r15, %r2, 2;
	cvt.u64.u32 	%rd45, %r15;
	cvt.u64.u32 	%rd46, %r2;
	shl.b32 	%r16, %r2, 1;
	cvt.u64.u32 	%rd47, %r16;
	shl.b64 	%rd191, %rd46, 2;
	shl.b64 	%rd193, %rd47, 2;
$L__BB0_20:
	shl.b64 	%rd189, %rd293, 2;
	add.s64 	%rd190, %rd3, %rd189;
	ld.u32 	%r17, [%rd190];
	add.s64 	%rd192, %rd190, %rd191;
	ld.u32 	%r18, [%rd192];
	add.s64 	%rd194, %rd190, %rd193;
	ld.u32 	%r19, [%rd194];
	shl.b64 	%rd195, %rd44, 2;
	add.s64 	%rd196, %rd190, %rd195;
	ld.u32 	%r20, [%rd196];
	add.s64 	%rd197, %rd2, %rd189;
	st.u32 	[%rd197], %r17;
	add.s64 	%rd198, %rd197, %rd191;
	st.u32 	[%rd198], %r18;
	add.s64 	%rd199, %rd197, %rd193;
	st.u32 	[%rd199], %r19;
	add.s64 	%rd200, %rd197, %rd195;
	st.u32 	[%rd200], %r20;
	add.s64 	%rd293, %rd293, %rd45;
	add.s64 	%rd201, %rd293, %rd44;
	setp.lt.s64 	%p16, %rd201, %rd42;
	@%p16 bra 	$L__BB0_20;
$L__BB0_21:
	setp.ge.s64 	%p17, %rd293, %rd42;
	@%p17 bra 	$L__BB0_31;
	cvt.u64.u32 	%rd51, %r2;
	not.b64 	%rd202, %rd293;
	add.s64 	%rd52, %rd42, %rd202;
	and.b64  	%rd203, %rd52, -4294967296;
	setp.eq.s64 	%p18, %rd203, 0;
	@%p18 bra 	$L__BB0_24;
	div.u64 	%rd288, %rd52, %rd51;
	bra.uni 	$L__BB0_25;
$L__BB0_3:
	mov.u64 	%rd308, 0;
	bra.uni 	$L__BB0_46;
$L__BB0_38:
	cvt.u32.u64 	%r65, %rd88;
	cvt.u32.u64 	%r66, %rd89;
	div.u32 	%r67, %r66, %r65;
	cvt.u64.u32 	%rd299, %r67;
$L__BB0_39:
	add.s64 	%rd235, %rd299, 1;
	and.b64  	%rd303, %rd235, 3;
	setp.eq.s64 	%p27, %rd303, 0;
	@%p27 bra 	$L__BB0_42;
	shl.b64 	%rd236, %rd304, 4;
	add.s64 	%rd301, %rd3, %rd236;
	shl.b64 	%rd95, %rd88, 4;
	add.s64 	%rd300, %rd2, %rd236;
$L__BB0_41:
	.pragma "nounroll";
	ld.v4.u32 	{%r68, %r69, %r70, %r71}, [%rd301];
	st.v4.u32 	[%rd300], {%r68, %r69, %r70, %r71};
	add.s64 	%rd304, %rd304, %rd88;
	add.s64 	%rd301, %rd301, %rd95;
	add.s64 	%rd300, %rd300, %rd95;
	add.s64 	%rd303, %rd303, -1;
	setp.ne.s64 	%p28, %rd303, 0;
	@%p28 bra 	$L__BB0_41;
$L__BB0_42:
	setp.lt.u64 	%p29, %rd299, 3;
	@%p29 bra 	$L__BB0_45;
	shl.b64 	%rd237, %rd304, 4;
	add.s64 	%rd306, %rd3, %rd237;
	shl.b64 	%rd107, %rd88, 4;
	add.s64 	%rd307, %rd2, %rd237;
$L__BB0_44:
	ld.v4.u32 	{%r76, %r77, %r78, %r79}, [%rd306];
	st.v4.u32 	[%rd307], {%r76, %r77, %r78, %r79};
	add.s64 	%rd238, %rd306, %rd107;
	ld.v4.u32 	{%r84, %r85, %r86, %r87}, [%rd238];
	add.s64 	%rd239, %rd307, %rd107;
	st.v4.u32 	[%rd239], {%r84, %r85, %r86, %r87};
	add.s64 	%rd240, %rd304, %rd88;
	add.s64 	%rd241, %rd240, %rd88;
	add.s64 	%rd242, %rd238, %rd107;
	ld.v4.u32 	{%r92, %r93, %r94, %r95}, [%rd242];
	add.s64 	%rd243, %rd239, %rd107;
	st.v4.u32 	[%rd243], {%r92, %r93, %r94, %r95};
	add.s64 	%rd244, %rd241, %rd88;
	add.s64 	%rd245, %rd242, %rd107;
	add.s64 	%rd306, %rd245, %rd107;
	ld.v4.u32 	{%r100, %r101, %r102, %r103}, [%rd245];
	add.s64 	%rd246, %rd243, %rd107;
	add.s64 	%rd307, %rd246, %rd107;
	st.v4.u32 	[%rd246], {%r100, %r101, %r102, %r103};
	add.s64 	%rd304, %rd244, %rd88;
	setp.lt.s64 	%p30, %rd304, %rd79;
	@%p30 bra 	$L__BB0_44;
$L__BB0_45:
	shl.b64 	%rd308, %rd79, 4;
	bra.uni 	$L__BB0_46;
$L__BB0_24:
	cvt.u32.u64 	%r21, %rd51;
	cvt.u32.u64 	%r22, %rd52;
	div.u32 	%r23, %r22, %r21;
	cvt.u64.u32 	%rd288, %r23;
$L__BB0_25:
	add.s64 	%rd204, %rd288, 1;
	and.b64  	%rd292, %rd204, 3;
	setp.eq.s64 	%p19, %rd292, 0;
	@%p19 bra 	$L__BB0_28;
	shl.b64 	%rd205, %rd293, 2;
	add.s64 	%rd290, %rd2, %rd205;
	shl.b64 	%rd58, %rd51, 2;
	add.s64 	%rd289, %rd3, %rd205;
$L__BB0_27:
	.pragma "nounroll";
	ld.u32 	%r24, [%rd289];
	st.u32 	[%rd290], %r24;
	add.s64 	%rd293, %rd293, %rd51;
	add.s64 	%rd290, %rd290, %rd58;
	add.s64 	%rd289, %rd289, %rd58;
	add.s64 	%rd292, %rd292, -1;
	setp.ne.s64 	%p20, %rd292, 0;
	@%p20 bra 	$L__BB0_27;
$L__BB0_28:
	setp.lt.u64 	%p21, %rd288, 3;
	@%p21 bra 	$L__BB0_31;
	shl.b64 	%rd206, %rd293, 2;
	add.s64 	%rd295, %rd3, %rd206;
	shl.b64 	%rd70, %rd51, 2;
	add.s64 	%rd296, %rd2, %rd206;
$L__BB0_30:
	ld.u32 	%r25, [%rd295];
	st.u32 	[%rd296], %r25;
	add.s64 	%rd207, %rd295, %rd70;
	ld.u32 	%r26, [%rd207];
	add.s64 	%rd208, %rd296, %rd70;
	st.u32 	[%rd208], %r26;
	add.s64 	%rd209, %rd293, %rd51;
	add.s64 	%rd210, %rd209, %rd51;
	add.s64 	%rd211, %rd207, %rd70;
	ld.u32 	%r27, [%rd211];
	add.s64 	%rd212, %rd208, %rd70;
	st.u32 	[%rd212], %r27;
	add.s64 	%rd213, %rd210, %rd51;
	add.s64 	%rd214, %rd211, %rd70;
	add.s64 	%rd295, %rd214, %rd70;
	ld.u32 	%r28, [%rd214];
	add.s64 	%rd215, %rd212, %rd70;
	add.s64 	%rd296, %rd215, %rd70;
	st.u32 	[%rd215], %r28;
	add.s64 	%rd293, %rd213, %rd51;
	setp.lt.s64 	%p22, %rd293, %rd42;
	@%p22 bra 	$L__BB0_30;
$L__BB0_31:
	shl.b64 	%rd308, %rd42, 2;
	bra.uni 	$L__BB0_46;
$L__BB0_10:
	cvt.u32.u64 	%r10, %rd14;
	cvt.u32.u64 	%r11, %rd15;
	div.u32 	%r12, %r11, %r10;
	cvt.u64.u32 	%rd277, %r12;
$L__BB0_11:
	add.s64 	%rd173, %rd277, 1;
	and.b64  	%rd281, %rd173, 3;
	setp.eq.s64 	%p11, %rd281, 0;
	@%p11 bra 	$L__BB0_14;
	shl.b64 	%rd174, %rd282, 1;
	add.s64 	%rd279, %rd2, %rd174;
	shl.b64 	%rd21, %rd14, 1;
	add.s64 	%rd278, %rd3, %rd174;
$L__BB0_13:
	.pragma "nounroll";
	ld.u16 	%rs5, [%rd278];
	st.u16 	[%rd279], %rs5;
	add.s64 	%rd282, %rd282, %rd14;
	add.s64 	%rd279, %rd279, %rd21;
	add.s64 	%rd278, %rd278, %rd21;
	add.s64 	%rd281, %rd281, -1;
	setp.ne.s64 	%p12, %rd281, 0;
	@%p12 bra 	$L__BB0_13;
$L__BB0_14:
	setp.lt.u64 	%p13, %rd277, 3;
	@%p13 bra 	$L__BB0_17;
	shl.b64 	%rd175, %rd282, 1;
	add.s64 	%rd284, %rd3, %rd175;
	shl.b64 	%rd33, %rd14, 1;
	add.s64 	%rd285, %rd2, %rd175;
$L__BB0_16:
	ld.u16 	%rs6, [%rd284];
	st.u16 	[%rd285], %rs6;
	add.s64 	%rd176, %rd284, %rd33;
	ld.u16 	%rs7, [%rd176];
	add.s64 	%rd177, %rd285, %rd33;
	st.u16 	[%rd177], %rs7;
	add.s64 	%rd178, %rd282, %rd14;
	add.s64 	%rd179, %rd178, %rd14;
	add.s64 	%rd180, %rd176, %rd33;
	ld.u16 	%rs8, [%rd180];
	add.s64 	%rd181, %rd177, %rd33;
	st.u16 	[%rd181], %rs8;
	add.s64 	%rd182, %rd179, %rd14;
	add.s64 	%rd183, %rd180, %rd33;
	add.s64 	%rd284, %rd183, %rd33;
	ld.u16 	%rs9, [%rd183];
	add.s64 	%rd184, %rd181, %rd33;
	add.s64 	%rd285, %rd184, %rd33;
	st.u16 	[%rd184], %rs9;
	add.s64 	%rd282, %rd182, %rd14;
	setp.lt.s64 	%p14, %rd282, %rd5;
	@%p14 bra 	$L__BB0_16;
$L__BB0_17:
	shl.b64 	%rd308, %rd5, 1;
$L__BB0_46:
	mov.u32 	%r108, %tid.x;
	cvt.u64.u32 	%rd314, %r108;
	mov.u32 	%r4, %ntid.x;
	mul.lo.s32 	%r109, %r4, 3;
	cvt.u64.u32 	%rd247, %r109;
	add.s64 	%rd248, %rd314, %rd247;
	sub.s64 	%rd118, %rd1, %rd308;
	setp.ge.s64 	%p31, %rd248, %rd118;
	@%p31 bra 	$L__BB0_49;
	shl.b32 	%r112, %r4, 2;
	cvt.u64.u32 	%rd120, %r112;
	cvt.u64.u32 	%rd121, %r4;
	shl.b32 	%r113, %r4, 1;
	cvt.u64.u32 	%rd122, %r113;
$L__BB0_48:
	add.s64 	%rd249, %rd314, %rd308;
	add.s64 	%rd250, %rd3, %rd249;
	ld.u8 	%rs10, [%rd250];
	add.s64 	%rd251, %rd250, %rd121;
	ld.u8 	%rs11, [%rd251];
	add.s64 	%rd252, %rd250, %rd122;
	ld.u8 	%rs12, [%rd252];
	add.s64 	%rd253, %rd250, %rd247;
	ld.u8 	%rs13, [%rd253];
	add.s64 	%rd254, %rd2, %rd249;
	st.u8 	[%rd254], %rs10;
	add.s64 	%rd255, %rd254, %rd121;
	st.u8 	[%rd255], %rs11;
	add.s64 	%rd256, %rd254, %rd122;
	st.u8 	[%rd256], %rs12;
	add.s64 	%rd257, %rd254, %rd247;
	st.u8 	[%rd257], %rs13;
	add.s64 	%rd314, %rd314, %rd120;
	add.s64 	%rd258, %rd314, %rd247;
	setp.lt.s64 	%p32, %rd258, %rd118;
	@%p32 bra 	$L__BB0_48;
$L__BB0_49:
	setp.ge.s64 	%p33, %rd314, %rd118;
	@%p33 bra 	$L__BB0_59;
	cvt.u64.u32 	%rd126, %r4;
	add.s64 	%rd259, %rd308, %rd314;
	not.b64 	%rd260, %rd259;
	add.s64 	%rd127, %rd1, %rd260;
	and.b64  	%rd261, %rd127, -4294967296;
	setp.eq.s64 	%p34, %rd261, 0;
	@%p34 bra 	$L__BB0_52;
	div.u64 	%rd311, %rd127, %rd126;
	bra.uni 	$L__BB0_53;
$L__BB0_52:
	cvt.u32.u64 	%r114, %rd126;
	cvt.u32.u64 	%r115, %rd127;
	div.u32 	%r116, %r115, %r114;
	cvt.u64.u32 	%rd311, %r116;
$L__BB0_53:
	add.s64 	%rd262, %rd311, 1;
	and.b64  	%rd313, %rd262, 3;
	setp.eq.s64 	%p35, %rd313, 0;
	@%p35 bra 	$L__BB0_56;
	add.s64 	%rd132, %rd2, %rd308;
	add.s64 	%rd133, %rd3, %rd308;
$L__BB0_55:
	.pragma "nounroll";
	add.s64 	%rd263, %rd133, %rd314;
	ld.u8 	%rs14, [%rd263];
	add.s64 	%rd264, %rd132, %rd314;
	st.u8 	[%rd264], %rs14;
	add.s64 	%rd314, %rd314, %rd126;
	add.s64 	%rd313, %rd313, -1;
	setp.ne.s64 	%p36, %rd313, 0;
	@%p36 bra 	$L__BB0_55;
$L__BB0_56:
	setp.lt.u64 	%p37, %rd311, 3;
	@%p37 bra 	$L__BB0_59;
	add.s64 	%rd265, %rd308, %rd314;
	add.s64 	%rd316, %rd3, %rd265;
	add.s64 	%rd317, %rd2, %rd265;
$L__BB0_58:
	ld.u8 	%rs15, [%rd316];
	st.u8 	[%rd317], %rs15;
	add.s64 	%rd266, %rd316, %rd126;
	ld.u8 	%rs16, [%rd266];
	add.s64 	%rd267, %rd317, %rd126;
	st.u8 	[%rd267], %rs16;
	add.s64 	%rd268, %rd314, %rd126;
	add.s64 	%rd269, %rd268, %rd126;
	add.s64 	%rd270, %rd266, %rd126;
	ld.u8 	%rs17, [%rd270];
	add.s64 	%rd271, %rd267, %rd126;
	st.u8 	[%rd271], %rs17;
	add.s64 	%rd272, %rd269, %rd126;
	add.s64 	%rd273, %rd270, %rd126;
	add.s64 	%rd316, %rd273, %rd126;
	ld.u8 	%rs18, [%rd273];
	add.s64 	%rd274, %rd271, %rd126;
	add.s64 	%rd317, %rd274, %rd126;
	st.u8 	[%rd274], %rs18;
	add.s64 	%rd314, %rd272, %rd126;
	setp.lt.s64 	%p38, %rd314, %rd118;
	@%p38 bra 	$L__BB0_58;
$L__BB0_59:
	ret;
}
)ptx";

}  // namespace jaxmpi
